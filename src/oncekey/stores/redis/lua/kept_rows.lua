-- #include common fields steps
-- A page of rows in the order of their names, with their responses and steps. ARGV: first name (as ZRANGEBYLEX takes it),
-- how many. Returns the name to go on after (empty: there are no more), and for each row its name, fields and steps.
local names = redis.call('ZRANGEBYLEX', base .. 'names', ARGV[4], '+', 'LIMIT', 0, ARGV[5])
local answer = {#names == tonumber(ARGV[5]) and names[#names] or ''}
for _, name in ipairs(names) do answer[#answer + 1] = {name, full(base .. 'k:' .. name), read_steps(name)} end
return answer
