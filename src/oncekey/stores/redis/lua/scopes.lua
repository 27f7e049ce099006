-- #include common
-- The next scopes with keys that wait for a duty. ARGV: duty, scope to go on after, how many. Returns pairs: the scope,
-- and 1 if it has a key that is due.
local answer = {}
local duty = ARGV[4]
for _, scope in ipairs(redis.call('ZRANGEBYLEX', base .. 'scopes:' .. duty, '(' .. ARGV[5], '+', 'LIMIT', 0, ARGV[6])) do
  local due = redis.call('ZCOUNT', base .. 'ask:' .. duty .. ':' .. scope, '-inf', whole(now))
  answer[#answer + 1] = {scope, math.min(due, 1)}
end
return answer
