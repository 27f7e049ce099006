-- #include common
-- The newest lines of a key's audit. ARGV: name, how many.
return redis.call('ZREVRANGE', base .. 'a:' .. ARGV[4], 0, ARGV[5] - 1)
