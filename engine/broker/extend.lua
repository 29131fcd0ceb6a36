-- More output is paid for: an absolute fence, so that repeating it changes nothing.
-- ARGV: id, authorized tokens.  Returns 1, or 0 where nobody knows the request.
local id, authorized = ARGV[1], ARGV[2]
local fields = call('HMGET', request_key(id), 'state', 'worker')
if not fields[1] then return 0 end
call('HSET', request_key(id), 'authorized', authorized) -- for the worker that takes it next
if fields[1] == 'taken' then
  local fence = {type = 'Extend', request_id = id, authorized_tokens = tonumber(authorized)}
  tell(fields[2], cmsgpack.pack(fence))
end
return 1
