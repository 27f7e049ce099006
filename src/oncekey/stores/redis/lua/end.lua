-- #include common fields
-- An owner ends its attempt. KEYS: epoch, rows. ARGV for each row: owner, state, head, body, error. An empty head is no
-- response; an error begins with '='. Returns now, and for each row its new expiry, or nil if it is not the owner's.
local answer = {whole(now)}
for i = 2, #KEYS do
  local at = (i - 2) * 5 + 2
  local owner, state, head, body, failure = unpack(ARGV, at + 1, at + 5)
  local row = redis.call('HMGET', KEYS[i], 'state', 'owner', 'expires', 'retention', 'error', 'ask')
  answer[i] = false
  if row[1] == 'in_progress' and row[2] == owner then
    local name = name_of(KEYS[i])
    local expires = whole(math.max(tonumber(row[3]), now + row[4]))
    redis.call('ZREM', base .. 'shelf:in_progress', name)
    redis.call('ZADD', base .. 'shelf:' .. state, expires, name)
    if head == '' then
      redis.call('HSET', KEYS[i], 'state', state, 'done', answer[1], 'expires', expires)
    else
      redis.call('HSET', KEYS[i], 'state', state, 'done', answer[1], 'expires', expires, 'head', head, 'body', body)
    end
    if failure ~= '' then
      redis.call('HSET', KEYS[i], 'error', string.sub(failure, 2))
    elseif row[5] then
      redis.call('HDEL', KEYS[i], 'error')
    end
    if row[6] then redis.call('HDEL', KEYS[i], 'ask') end
    answer[i] = expires
  end
end
return answer
