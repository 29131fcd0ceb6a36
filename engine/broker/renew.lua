-- A worker is alive and still runs these requests.
-- ARGV: worker, lease ms, (id, attempt) of each.  Returns {born, ids that the worker has lost…}.
local answer = {born()}
local deadline = now + tonumber(ARGV[2])
for i = 3, #ARGV, 2 do
  local fields = call('HMGET', request_key(ARGV[i]), 'worker', 'attempt')
  if fields[1] == ARGV[1] and fields[2] == ARGV[i + 1] then
    call('ZADD', LEASE, 'XX', deadline, ARGV[i])
  else
    answer[#answer + 1] = ARGV[i]
  end
end
return answer
