-- #include common
-- The names of keys that carry a downstream key or a provider's id. ARGV[4]: how many of each; then 'd:…' and 'p:…'.
local found = {}
for i = 5, #ARGV do
  for _, name in ipairs(redis.call('ZRANGE', base .. ARGV[i], 0, ARGV[4] - 1)) do found[#found + 1] = name end
end
return found
