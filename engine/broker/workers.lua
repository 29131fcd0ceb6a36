-- The last heartbeat of every worker that is alive.
-- ARGV: worker ms.
local WORKERS = prefix .. 'workers'
call('ZREMRANGEBYSCORE', WORKERS, '-inf', now - tonumber(ARGV[1]))
local heartbeats = {}
for _, worker in ipairs(call('ZRANGE', WORKERS, 0, -1)) do
  local heartbeat = call('GET', prefix .. 'worker:' .. worker)
  if heartbeat then heartbeats[#heartbeats + 1] = heartbeat end
end
return heartbeats
