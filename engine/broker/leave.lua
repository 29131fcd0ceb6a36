-- An API node says goodbye: the next sweep drops what it leaves behind.
-- ARGV: node.
call('ZADD', NODES, 'XX', 0, ARGV[1])
return 1
