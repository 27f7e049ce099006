-- #include common fields
-- The numbers of a health check. ARGV: how far to count, the words that an unasked key's error begins with, and how long
-- a half-done key may wait. Returns a JSON document.
local most, unasked, patience = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local found = {cards = {}, unknowns = {}, waiting = {}, born = 0, lease = 0}
for _, shelf in ipairs({'in_progress', 'pending', 'completed', 'failed', 'failed_retryable', 'half_done', 'unknown',
                        'expired'}) do
  found.cards[shelf] = redis.call('ZCARD', base .. 'shelf:' .. shelf)
end
found.dead = redis.call('ZCOUNT', base .. 'shelf:unknown', '+inf', '+inf') +
             redis.call('ZCOUNT', base .. 'resumable', '+inf', '+inf')
for _, name in ipairs(redis.call('ZRANGE', base .. 'shelf:unknown', 0, most - 1)) do
  local row = read(base .. 'k:' .. name)
  local operation = operation_of(row)
  local of = found.unknowns[operation] or {keys = 0, unasked = 0}
  of.keys = of.keys + 1
  if row.error and string.sub(row.error, 1, #unasked) == unasked then of.unasked = of.unasked + 1 end
  found.unknowns[operation] = of
  found.born = math.max(found.born, now - row.born)
end
local oldest = redis.call('ZRANGE', base .. 'shelf:in_progress', 0, 0, 'WITHSCORES')
if oldest[2] then found.lease = now - oldest[2] end
for _, name in ipairs(redis.call('ZRANGE', base .. 'shelf:half_done', 0, most - 1)) do
  local row = read(base .. 'k:' .. name)
  if row.tries == 0 and row.lease + patience <= now then
    local operation = operation_of(row)
    local of = found.waiting[operation] or {keys = 0, longest = 0}
    of.keys = of.keys + 1
    of.longest = math.max(of.longest, now - row.lease)
    found.waiting[operation] = of
  end
end
found.born, found.lease = whole(found.born), whole(found.lease)
for _, of in pairs(found.waiting) do of.longest = whole(of.longest) end
return cjson.encode(found)
