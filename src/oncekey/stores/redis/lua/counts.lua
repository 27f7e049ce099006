-- #include common
-- The numbers of a health check. ARGV: how far to count, the words that an unasked key's error begins with, and how long
-- a half-done key may wait. Returns a JSON document.
local most, unasked, patience = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local found = {cards = {}, unknowns = {}, waiting = {}, born = 0, lease = 0}
for _, shelf in ipairs({'in_progress', 'pending', 'completed', 'failed', 'failed_retryable', 'half_done', 'unknown',
                        'expired'}) do
  found.cards[shelf] = redis.call('ZCARD', base .. 'shelf:' .. shelf)
end
found.dead = redis.call('ZCOUNT', base .. 'shelf:unknown', '+inf', '+inf') +
             redis.call('ZCOUNT', base .. 'resumable', '+inf', '+inf')
for _, name in ipairs(redis.call('ZRANGE', base .. 'shelf:unknown', 0, most - 1)) do
  local row = redis.call('HMGET', base .. 'k:' .. name, 'operation', 'error', 'born')
  local of = found.unknowns[row[1]] or {keys = 0, unasked = 0}
  of.keys = of.keys + 1
  if row[2] and string.sub(row[2], 1, #unasked) == unasked then of.unasked = of.unasked + 1 end
  found.unknowns[row[1]] = of
  found.born = math.max(found.born, now - row[3])
end
local oldest = redis.call('ZRANGE', base .. 'shelf:in_progress', 0, 0, 'WITHSCORES')
if oldest[2] then found.lease = now - oldest[2] end
for _, name in ipairs(redis.call('ZRANGE', base .. 'shelf:half_done', 0, most - 1)) do
  local row = redis.call('HMGET', base .. 'k:' .. name, 'operation', 'tries', 'lease')
  if tonumber(row[2]) == 0 and row[3] + patience <= now then
    local of = found.waiting[row[1]] or {keys = 0, longest = 0}
    of.keys = of.keys + 1
    of.longest = math.max(of.longest, now - row[3])
    found.waiting[row[1]] = of
  end
end
found.born, found.lease = whole(found.born), whole(found.lease)
for _, of in pairs(found.waiting) do of.longest = whole(of.longest) end
return cjson.encode(found)
