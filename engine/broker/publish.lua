-- Messages of one step to API nodes. The first frame of a request leaves only if the worker still
-- holds it, so that two workers never speak of one attempt.
-- ARGV: worker, born as the worker knows it, number of first frames, (id, attempt) of each,
--       (node, message) of each.
-- Returns the ids that the worker has lost; if there are any, nothing was sent.
local FIRST = 4
local worker, known_born, end_first = ARGV[1], ARGV[2], FIRST + 2 * tonumber(ARGV[3])
local lost = {}
local is_wiped = call('GET', BORN) ~= known_born
for i = FIRST, end_first - 1, 2 do
  local fields = call('HMGET', request_key(ARGV[i]), 'worker', 'attempt')
  local is_owner = fields[1] == worker and fields[2] == ARGV[i + 1]
  -- A wiped Redis knows nothing of what runs; the worker's next renewal tells it.
  if not is_owner and (fields[2] or not is_wiped) then lost[#lost + 1] = ARGV[i] end
end
if #lost > 0 then return lost end
for i = FIRST, end_first - 1, 2 do
  call('HDEL', request_key(ARGV[i]), 'body')
end
for i = end_first, #ARGV, 2 do send_frames(ARGV[i], ARGV[i + 1]) end
return lost
