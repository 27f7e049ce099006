-- #include common fields
-- Read each row, or insert it. KEYS: epochs, rows. ARGV: the end of `fixed`, effects, lease, retention, and a JSON array with
-- the fingerprint and the owner of each row. Returns now; if a row was there: a JSON array with each row, null for those that
-- this call inserted; and the bodies of the rows that have a response.
local rest, effects, lease, retention = ARGV[4], ARGV[5], whole(now + ARGV[6]), ARGV[7]
local wanted = cjson.decode(ARGV[8])
local answer, texts, found, due, names = {whole(now)}, {}, false, {}, {}
local after_owner = table.concat({'', quoted(effects), 1, 0, lease, answer[1], 'null', 'null', 'null', 'null', retention,
                                   whole(now + retention)}, ',')
for i = 1, ROWS do
  local key = KEYS[EPOCHS + i]
  local row = redis.call('HMGET', key, 'fixed', 'live', 'head', 'body')
  if row[2] then
    if not found then answer[2], found = '', true end
    texts[i] = text_of(row[1], row[2], row[3])
    if row[3] then answer[#answer + 1] = row[4] end
  else
    local name = enter(key)
    redis.call('HSET', key, 'fixed', '"' .. wanted[i * 2 - 1] .. '",' .. rest,
               'live', '"in_progress",' .. quoted(wanted[i * 2]) .. after_owner)
    add(due, base .. 'shelf:in_progress', lease, name)
    add(names, base .. 'names', 0, name)
    texts[i] = 'null'
  end
end
call_each('ZADD', due)
call_each('ZADD', names)
if found then answer[2] = '[' .. table.concat(texts, ',') .. ']' end
return answer
