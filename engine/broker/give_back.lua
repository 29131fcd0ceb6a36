-- A worker that drains returns requests in good order; the attempt does not count.
-- ARGV: worker, (id, attempt) of each.
for i = 2, #ARGV, 2 do
  local fields = call('HMGET', request_key(ARGV[i]), 'worker', 'attempt')
  if fields[1] == ARGV[1] and fields[2] == ARGV[i + 1] then lose(ARGV[i], 0, math.huge) end
end
return 1
