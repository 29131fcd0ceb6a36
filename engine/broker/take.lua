-- The least-served tenant's least key, again and again, until the worker has enough.
-- A tenant pays the predicted prefill in advance, so that one take after the other is fair before the
-- worker has reported any second; the advance goes back when the worker lets go of the request.
-- ARGV: worker, max requests, lease ms.  Returns {body, attempt, body, attempt, …}.
local SKIP_LIMIT = 256 -- ids whose request has expired, looked at per call
local worker, left, skips = ARGV[1], tonumber(ARGV[2]), SKIP_LIMIT
local deadline = now + tonumber(ARGV[3])
local taken = {}
while left > 0 and skips > 0 do
  local tenant = call('ZRANGE', TENANTS, 0, 0)[1]
  if not tenant then break end
  local id = call('ZPOPMIN', queue_key(tenant))[1]
  local fields = id and call('HMGET', request_key(id), 'body', 'attempt', 'weight', 'work')
  if fields and fields[1] then
    call('HSET', request_key(id), 'state', 'taken', 'worker', worker)
    call('ZADD', LEASE, deadline, id)
    charge(tenant, tonumber(fields[4]) / tonumber(fields[3]))
    taken[#taken + 1] = fields[1]
    taken[#taken + 1] = fields[2]
    left = left - 1
  else
    skips = skips - 1
  end
  deactivate_if_empty(tenant)
end
if #taken > 0 then call('INCRBY', TAKEN, #taken / 2) end
-- The next worker is woken exactly while something is left: no wake-up is lost, few are idle.
if call('EXISTS', TENANTS) == 0 then
  call('DEL', WAKE)
elseif call('LLEN', WAKE) == 0 then
  wake()
end
return taken
