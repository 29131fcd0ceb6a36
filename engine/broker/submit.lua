-- A request enters the queue.
-- Repeating a submission changes nothing, a higher attempt replaces a lower one: whoever holds that
-- one is told to stop.
-- ARGV: id, tenant, node, key, weight, work, attempt, request ms, node ms, body.
-- Returns 1, or 0 where it was there already.
local id, tenant, node, key = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local known = call('HMGET', request_key(id), 'attempt', 'worker')
if known[1] then
  if tonumber(known[1]) >= tonumber(ARGV[7]) then return 0 end
  if known[2] then tell_cancel(known[2], id, known[1]) end
  drop(id)
end
born()
call('HSET', request_key(id), 'body', ARGV[10], 'state', 'queued', 'tenant', tenant, 'node', node,
     'key', key, 'weight', ARGV[5], 'work', ARGV[6], 'attempt', ARGV[7])
call('PEXPIRE', request_key(id), ARGV[8])
call('SADD', node_key(node), id)
call('ZADD', NODES, 'NX', now + tonumber(ARGV[9]), node)
enqueue(id, tenant, key)
return 1
