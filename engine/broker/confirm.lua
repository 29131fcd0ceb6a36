-- The hold is committed: from now on workers may take the request.
-- ARGV: id, authorized tokens: the fence that the hold covers.  Returns 1, or 0 where nobody knows the request (expired, or Redis was wiped).
local fields = call('HMGET', request_key(ARGV[1]), 'state', 'tenant', 'key')
if not fields[1] then return 0 end
if fields[1] == 'unconfirmed' then
  call('ZREM', UNCONFIRMED, ARGV[1])
  call('HSET', request_key(ARGV[1]), 'state', 'queued', 'authorized', ARGV[2])
  enqueue(ARGV[1], fields[2], fields[3])
end
return 1
