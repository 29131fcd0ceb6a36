-- An API node is alive.
-- ARGV: node, node ms, id of the last message that it has read (what is older may go).
-- Returns born.
local deadline = now + tonumber(ARGV[2])
call('ZADD', NODES, deadline, ARGV[1])
if ARGV[3] ~= '' then call('XTRIM', prefix .. 'frames:' .. ARGV[1], 'MINID', '~', ARGV[3]) end
return born()
