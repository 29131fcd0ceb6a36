-- Nobody wants the request any more: withdraw it, or tell the worker that holds it.
-- ARGV: id.  Returns 1, or 0 where nobody knows the request.
local id = ARGV[1]
local fields = call('HMGET', request_key(id), 'state', 'worker', 'attempt', 'cancelled')
if not fields[1] then return 0 end
if fields[1] ~= 'taken' then
  drop(id)
elseif not fields[4] then
  call('HSET', request_key(id), 'cancelled', '1')
  tell_cancel(fields[2], id, fields[3])
end
return 1
