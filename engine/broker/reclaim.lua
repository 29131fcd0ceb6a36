-- After Redis was wiped, a worker announces again what it runs. A request that its gateway has put
-- back into the queue meanwhile is taken out; one that another worker holds is lost.
-- ARGV: worker, lease ms, request ms, then of each: id, attempt, tenant, node, key, weight, work,
--       body (empty once its first frame has left).  Returns the ids that the worker has lost.
local worker, deadline = ARGV[1], now + tonumber(ARGV[2])
local lost = {}
for i = 4, #ARGV, 8 do
  local id, attempt, tenant, node = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local fields = call('HMGET', request_key(id), 'state', 'attempt', 'worker')
  local is_own = fields[1] == 'taken' and fields[3] == worker
  if fields[1] and (fields[2] ~= attempt or (fields[1] == 'taken' and not is_own)) then
    lost[#lost + 1] = id
  elseif not is_own then
    drop(id)
    call('HSET', request_key(id), 'state', 'taken', 'worker', worker, 'tenant', tenant, 'node', node,
         'key', ARGV[i + 4], 'weight', ARGV[i + 5], 'work', ARGV[i + 6], 'attempt', attempt)
    if ARGV[i + 7] ~= '' then call('HSET', request_key(id), 'body', ARGV[i + 7]) end
    call('PEXPIRE', request_key(id), ARGV[3])
    call('SADD', node_key(node), id)
    call('ZADD', LEASE, deadline, id)
    charge(tenant, tonumber(ARGV[i + 6]) / tonumber(ARGV[i + 5]))
  end
end
return lost
