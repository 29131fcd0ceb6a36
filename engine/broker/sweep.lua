-- Clean up after whoever died. Anybody may run it as often as he likes; it does little at a time.
-- ARGV: max attempts, pause ms between two sweeps.  Returns the number of requests looked at.
local LIMIT = 200
local NODE_LIMIT = 8
local IDLE_LIMIT = 100000
if not call('SET', prefix .. 'swept', '1', 'NX', 'PX', ARGV[2]) then return 0 end
local num_seen = 0

-- 1. requests whose worker is gone
for _, id in ipairs(call('ZRANGEBYSCORE', LEASE, '-inf', now, 'LIMIT', 0, LIMIT)) do
  lose(id, 1, tonumber(ARGV[1]))
  num_seen = num_seen + 1
end

-- 2. requests whose API node is gone: nobody reads what they would say
for _, node in ipairs(call('ZRANGEBYSCORE', NODES, '-inf', now, 'LIMIT', 0, NODE_LIMIT)) do
  local ids = call('SRANDMEMBER', node_key(node), LIMIT)
  table.sort(ids) -- the order decides which tenant leaves last; let it not be chance
  for _, id in ipairs(ids) do
    local fields = call('HMGET', request_key(id), 'state', 'worker', 'attempt')
    if fields[1] == 'taken' then
      call('HSET', request_key(id), 'cancelled', '1')
      tell_cancel(fields[2], id, fields[3])
    else
      drop(id)
    end
    call('SREM', node_key(node), id)
    num_seen = num_seen + 1
  end
  if call('EXISTS', node_key(node)) == 0 then
    call('ZREM', NODES, node)
    call('DEL', prefix .. 'frames:' .. node)
  end
end

-- 3. idle tenants that owe no more than everybody: `activate` would lift them anyway
local least = call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')[2]
if not least then
  local last = call('GET', LAST)
  least = last and call('ZSCORE', IDLE, last)
end
if least then call('ZREMRANGEBYSCORE', IDLE, '-inf', '(' .. least) end
call('ZREMRANGEBYRANK', IDLE, 0, -IDLE_LIMIT - 1)

-- 4. a wake-up that died with the worker that it woke
if call('EXISTS', TENANTS) == 1 and call('LLEN', WAKE) == 0 then wake() end
return num_seen
