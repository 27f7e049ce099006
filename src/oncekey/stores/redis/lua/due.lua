-- #include common fields
-- Rows that are due, oldest first. ARGV[4]: how many; then the sorted sets. Returns now, and for each row its name, the
-- time when it became due, and its fields.
local answer = {whole(now)}
for i = 5, #ARGV do
  local found = redis.call('ZRANGEBYSCORE', base .. ARGV[i], '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, ARGV[4])
  for j = 1, #found, 2 do
    local row = slim(base .. 'k:' .. found[j])
    if row then answer[#answer + 1] = {found[j], whole(tonumber(found[j + 1])), row} end
  end
end
return answer
