-- A worker is done with these requests: all their frames have left.
-- ARGV: worker, (id, attempt) of each.
for i = 2, #ARGV, 2 do
  local fields = call('HMGET', request_key(ARGV[i]), 'worker', 'attempt')
  if fields[1] == ARGV[1] and fields[2] == ARGV[i + 1] then drop(ARGV[i]) end
end
return 1
