-- #include common fields
-- Replace lines of the audit that still are there. KEYS: epochs, rows, which need not exist. ARGV for each row: the line as
-- it was, and as it becomes. Returns now, and for each line whether it was replaced.
local answer = {whole(now)}
for i = 1, ROWS do
  local old, new = unpack(ARGV, i * 2 + 2, i * 2 + 3)
  local name = enter(KEYS[EPOCHS + i])
  local of_key = base .. 'a:' .. name
  local at = redis.call('ZSCORE', of_key, old)
  answer[i + 1] = 0
  if at then
    for _, lines in ipairs({base .. 'audit', of_key}) do
      redis.call('ZREM', lines, old)
      redis.call('ZADD', lines, at, new)
    end
    answer[i + 1] = 1
  end
end
return answer
