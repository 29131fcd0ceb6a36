-- What others want of a worker.
-- ARGV: worker, most messages.
return call('LPOP', prefix .. 'control:' .. ARGV[1], ARGV[2]) or {}
