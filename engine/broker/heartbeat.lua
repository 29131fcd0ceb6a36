-- What a worker says of itself.
-- ARGV: worker, worker ms, encoded heartbeat.  Returns {born, number of tenants that wait}.
call('SET', prefix .. 'worker:' .. ARGV[1], ARGV[3], 'PX', ARGV[2])
call('ZADD', prefix .. 'workers', now, ARGV[1])
return {born(), call('ZCARD', TENANTS)}
