-- #include common
-- Write one line of the audit that belongs to no key. ARGV: name, line.
local number = redis.call('INCR', base .. 'audit:n')
local text = string.format('%016d', number) .. whole(now) .. ' ' .. ARGV[5] .. '\n' .. ARGV[4]
redis.call('ZADD', base .. 'audit', whole(now), text)
redis.call('ZADD', base .. 'a:' .. ARGV[4], whole(now), text)
return 1
