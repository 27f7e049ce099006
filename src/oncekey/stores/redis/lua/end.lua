-- #include common fields
-- An owner ends its attempt. KEYS: epochs, rows. ARGV: state, error, a JSON array of owners, and for each row head and body. An
-- empty head is no response; an error begins with '='. Returns now, and the numbers of the rows that are not the owner's.
local state, failure, owners = ARGV[4], ARGV[5], cjson.decode(ARGV[6])
local answer, left, due = {whole(now)}, {}, {}
local failed = failure ~= '' and quoted(string.sub(failure, 2)) or 'null'
local ended = ',' .. failed .. ',null,' .. answer[1] .. ','
-- The values before the error, the retention and the expiry of a row without error, date for upkeep, and end.
local PARTS = '^"in_progress",(.*),null,null,null,(%-?%d+),(%-?%d+)$'

for i = 1, ROWS do
  local key = KEYS[EPOCHS + i]
  local live = redis.call('HGET', key, 'live')
  local mine = '"in_progress",' .. quoted(owners[i]) .. ','
  if live and string.sub(live, 1, #mine) == mine then
    local kept, retention, expires = string.match(live, PARTS)
    if not kept then
      local row = values_of(live)
      row.error, row.ask, row.done = nil, nil, nil
      kept, retention, expires = string.match(live_of(row), PARTS)
    end
    local name = enter(key)
    expires = whole(math.max(tonumber(expires), now + retention))
    live = '"' .. state .. '",' .. kept .. ended .. retention .. ',' .. expires
    if ARGV[i * 2 + 5] == '' then
      redis.call('HSET', key, 'live', live)
      redis.call('HDEL', key, 'head', 'body')
    else
      redis.call('HSET', key, 'live', live, 'head', ARGV[i * 2 + 5], 'body', ARGV[i * 2 + 6])
    end
    add(left, base .. 'shelf:in_progress', name)
    add(due, base .. 'shelf:' .. state, expires, name)
  else
    answer[#answer + 1] = i
  end
end
call_each('ZREM', left)
call_each('ZADD', due)
return answer
