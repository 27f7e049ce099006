-- #include common fields
-- Write new results over the old ones, where they still are. KEYS: epochs, rows. ARGV for each row: the name of a step, its
-- result as it was, and as it becomes. Returns now, and for each row whether it was written.
local answer = {whole(now)}
for i = 1, ROWS do
  local step, old, new = unpack(ARGV, i * 3 + 1, i * 3 + 3)
  local name = enter(KEYS[EPOCHS + i])
  local key = base .. 's:' .. name
  local number = redis.call('HGET', key, '#' .. step)
  answer[i + 1] = 0
  if number and redis.call('HGET', key, number .. ':result') == old then
    redis.call('HSET', key, number .. ':result', new)
    answer[i + 1] = 1
  end
end
return answer
