-- #include common fields
-- Read each row, or insert it. KEYS: epoch, rows. ARGV for each row: owner, operation, effects, fixed, lease, retention.
-- Returns now, and for each row its fields, or nil if this call inserted it.
local answer = {whole(now)}
for i = 2, #KEYS do
  answer[i] = full(KEYS[i])
  if not answer[i] then
    local at = (i - 2) * 6 + 2
    local lease, expires = whole(now + ARGV[at + 5]), whole(now + ARGV[at + 6])
    local name = name_of(KEYS[i])
    redis.call('HSET', KEYS[i], 'operation', ARGV[at + 2], 'fixed', ARGV[at + 4], 'effects', ARGV[at + 3],
               'state', 'in_progress', 'attempt', 1, 'owner', ARGV[at + 1], 'lease', lease, 'tries', 0,
               'born', answer[1], 'retention', ARGV[at + 6], 'expires', expires)
    redis.call('ZADD', base .. 'shelf:in_progress', lease, name)
    redis.call('ZADD', base .. 'names', 0, name)
  end
end
return answer
