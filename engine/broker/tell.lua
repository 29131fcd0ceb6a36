-- A control message to a worker.
-- ARGV: worker, message.
tell(ARGV[1], ARGV[2])
return 1
