-- One choice has said enough: tell the worker that runs the request, if one does.
-- ARGV: id, choice.  Returns 1, or 0 where nobody runs the request.
local id = ARGV[1]
local fields = call('HMGET', request_key(id), 'state', 'worker')
if fields[1] ~= 'taken' then return 0 end
tell(fields[2], cmsgpack.pack({type = 'EndChoice', request_id = id, choice = tonumber(ARGV[2])}))
return 1
