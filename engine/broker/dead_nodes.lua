-- Which of these API nodes are dead? After a wipe nobody is, until all have had time to announce.
-- ARGV: node ms, nodes.
local dead = {}
if now - tonumber(born()) < 2 * tonumber(ARGV[1]) then return dead end
for i = 2, #ARGV do
  local deadline = call('ZSCORE', NODES, ARGV[i])
  if not deadline or tonumber(deadline) < now then dead[#dead + 1] = ARGV[i] end
end
return dead
