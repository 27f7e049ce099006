-- #include common fields rows steps
-- Move each row that still is as its swap says. KEYS: epochs, rows. ARGV for each row: the swap as JSON, and a body.
-- Returns now, and for each row its fields after the move (before it, where it is deleted), or nil if it was refused.
local function fits(row, change)
  if row.state ~= change.from_state or row.owner ~= change.owner then return false end
  if change.lease_over_by and row.lease + change.lease_over_by > now then return false end
  if change.past_expiry and row.expires > now then return false end
  if change.from_effects and row.effects ~= change.from_effects then return false end
  -- discard is for a first attempt without steps
  return change.to_state or row.state ~= 'in_progress' or (row.attempt == 1 and not row.point)
end

local function moved(row, change)
  local ends = change.to_state == 'completed' or change.to_state == 'failed'
  local settles = row.state == 'unknown' and change.to_state == 'failed_retryable'
  local new = {}
  for field, value in pairs(row) do new[field] = value end
  new.state = change.to_state
  new.effects = change.effects or row.effects
  new.attempt = change.attempt or row.attempt
  new.owner = change.new_owner or row.owner
  if change.lease_seconds then new.lease = now + change.lease_seconds end
  if change.point then new.point = change.point end
  new.error = change.error
  new.ask = change.reconcile_in and now + change.reconcile_in
  new.tries = change.tries or row.tries
  new.done = ends and now or nil
  if ends or settles then new.expires = math.max(row.expires, now + row.retention) end
  return new
end

local function restarted(change)
  local start = change.restart
  return {fixed = start.fixed, effects = start.effects, state = 'in_progress', attempt = 1, owner = start.owner,
          lease = now + start.lease, tries = 0, born = now, retention = start.retention, expires = now + start.retention}
end

-- A line has a number, so that no two are equal, the time, its words as JSON (which has no raw line break), and the name.
local function write_audit(name, line)
  local number = redis.call('INCR', base .. 'audit:n')
  local text = string.format('%016d', number) .. whole(now) .. ' ' .. line .. '\n' .. name
  redis.call('ZADD', base .. 'audit', whole(now), text)
  redis.call('ZADD', base .. 'a:' .. name, whole(now), text)
end

local answer = {whole(now)}
for i = 1, ROWS do
  local key, change = KEYS[EPOCHS + i], cjson.decode(ARGV[i * 2 + 2])
  local name, row = enter(key), read(key)
  answer[i + 1] = false
  if row and fits(row, change) then
    unfile(name, row)
    if change.forgets_steps then forget_steps(name) end
    if change.step then write_step(name, change.step) end
    if change.audit then write_audit(name, change.audit) end
    if not change.to_state then
      answer[i + 1] = full(key)
      redis.call('DEL', key)
      redis.call('ZREM', base .. 'names', name)
    else
      local new = change.restart and restarted(change) or moved(row, change)
      redis.call('HSET', key, 'fixed', new.fixed, 'live', live_of(new))
      if change.head and not change.restart then
        redis.call('HSET', key, 'head', change.head, 'body', ARGV[i * 2 + 3])
      else
        redis.call('HDEL', key, 'head', 'body')
      end
      file(name, new)
      answer[i + 1] = slim(key)
    end
  end
end
return answer
