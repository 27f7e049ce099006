-- #include common
-- The names of all rows in a state, if they are few. ARGV[4]: how many are few; then the shelves of the state. Returns
-- nil if there are more.
local names = {}
for i = 5, #ARGV do
  local key = base .. 'shelf:' .. ARGV[i]
  if redis.call('ZCARD', key) + #names > tonumber(ARGV[4]) then return false end
  for _, name in ipairs(redis.call('ZRANGE', key, 0, -1)) do names[#names + 1] = name end
end
return names
