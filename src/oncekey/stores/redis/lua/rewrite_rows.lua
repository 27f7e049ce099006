-- #include common fields
-- Write new values over the old ones, where they still are. KEYS: epochs, rows. ARGV for each row: head, body and error as
-- they were, and as they become. An empty head is no response; an error begins with '='. Returns now, and for each row
-- whether it was written.
local answer = {whole(now)}
for i = 1, ROWS do
  local key = KEYS[EPOCHS + i]
  local old_head, old_body, old_failure, head, body, failure = unpack(ARGV, i * 6 - 2, i * 6 + 3)
  local found = redis.call('HMGET', key, 'head', 'body', 'live')
  local row = found[3] and values_of(found[3])
  answer[i + 1] = 0
  if row and (found[1] or '') == old_head and (found[2] or '') == old_body
     and (row.error and '=' .. row.error or '') == old_failure then
    if head ~= '' then redis.call('HSET', key, 'head', head, 'body', body) end
    if failure ~= '' then
      row.error = string.sub(failure, 2)
      redis.call('HSET', key, 'live', live_of(row))
    end
    answer[i + 1] = 1
  end
end
return answer
