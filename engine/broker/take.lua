-- The least-served tenant's least key, again and again, until the worker has enough.
-- A tenant pays the predicted prefill in advance, so that one take after the other is fair before the
-- worker has reported any second; the advance goes back when the worker lets go of the request.
-- Then `spare` more, one each of tenants that had none taken now and of whom none waits in the worker.
-- ARGV: worker, max requests, lease ms, spare, waiting tenants…
-- Returns {body, attempt, authorized tokens (or '': as the body says), body, …}.
local SKIP_LIMIT = 256 -- ids whose request has expired, looked at per call
local worker, left, skips = ARGV[1], tonumber(ARGV[2]), SKIP_LIMIT
local deadline, spare = now + tonumber(ARGV[3]), tonumber(ARGV[4])
local taken, passed_over, num_passed_over = {}, {}, 0
local function pass_over(tenant)
  if not passed_over[tenant] then num_passed_over = num_passed_over + 1 end
  passed_over[tenant] = true
end
for i = 5, #ARGV do pass_over(ARGV[i]) end
local function next_tenant()
  if left > 0 then return call('ZRANGE', TENANTS, 0, 0)[1] end
  for _, tenant in ipairs(call('ZRANGE', TENANTS, 0, num_passed_over)) do
    if not passed_over[tenant] then return tenant end
  end
end
while left + spare > 0 and skips > 0 do
  local tenant = next_tenant()
  if not tenant then break end
  local id = call('ZPOPMIN', queue_key(tenant))[1]
  local fields = id and call('HMGET', request_key(id), 'body', 'attempt', 'weight', 'work', 'authorized')
  if fields and fields[1] then
    call('HSET', request_key(id), 'state', 'taken', 'worker', worker)
    call('ZADD', LEASE, deadline, id)
    charge(tenant, tonumber(fields[4]) / tonumber(fields[3]))
    taken[#taken + 1] = fields[1]
    taken[#taken + 1] = fields[2]
    taken[#taken + 1] = fields[5] or ''
    pass_over(tenant)
    if left > 0 then left = left - 1 else spare = spare - 1 end
  else
    skips = skips - 1
  end
  deactivate_if_empty(tenant)
end
if #taken > 0 then call('INCRBY', TAKEN, #taken / 3) end
if left + spare > 0 then call('DEL', NEWCOMERS) end -- none is left that this worker could take
-- The next worker is woken exactly while something is left: no wake-up is lost, few are idle.
if call('EXISTS', TENANTS) == 0 then
  call('DEL', WAKE)
elseif call('LLEN', WAKE) == 0 then
  wake()
end
return taken
