-- Where requests stand.
-- ARGV: ids.  Returns {born, requests taken so far, number of tenants that wait, {lengths of the
-- queues of at most TENANT_LIMIT of them}, {state, place in its tenant's queue (or -1), …}}.
local TENANT_LIMIT = 1000
local lengths, places = {}, {}
for i, tenant in ipairs(call('ZRANGE', TENANTS, 0, TENANT_LIMIT - 1)) do
  lengths[i] = call('ZCARD', queue_key(tenant))
end
for i, id in ipairs(ARGV) do
  local fields = call('HMGET', request_key(id), 'state', 'tenant')
  places[2 * i - 1] = fields[1] or 'gone'
  places[2 * i] = fields[1] == 'queued' and call('ZRANK', queue_key(fields[2]), id) or -1
end
return {born(), tonumber(call('GET', TAKEN) or '0'), call('ZCARD', TENANTS), lengths, places}
