-- A row stands on one shelf, a sorted set by the time when it is due for upkeep. Rows that wait for a provider or for the
-- resumer are also filed by scope.
-- The shelf of a row, and its place on it.
local function shelf_of(row)
  local state = row.state
  if state == 'in_progress' then return state, whole(row.lease) end
  if state == 'unknown' then return state, row.ask and whole(row.ask) or '+inf' end
  if state == 'expired' then return state, whole(row.expires + row.retention) end
  if state == 'failed_retryable' and row.point then return 'half_done', whole(row.expires) end
  return state, whole(row.expires)
end

-- When a row is due for the reconciler or the resumer: its duty and the time. '+inf': a dead letter.
local function asked_of(row)
  if row.state == 'unknown' then return 'unknowns', row.ask and whole(row.ask) or '+inf' end
  if row.state == 'failed_retryable' then
    if row.ask then return 'resumable', whole(row.ask) end
    if row.point and row.tries > 0 then return 'resumable', '+inf' end
  end
end

local function unfile(name, row)
  local shelf = shelf_of(row)
  redis.call('ZREM', base .. 'shelf:' .. shelf, name)
  local duty = asked_of(row)
  if duty then
    local scope = string.match(name, '^[^%z]*')
    local drawer = base .. 'ask:' .. duty .. ':' .. scope
    if duty == 'resumable' then redis.call('ZREM', base .. 'resumable', name) end
    redis.call('ZREM', drawer, name)
    if redis.call('EXISTS', drawer) == 0 then redis.call('ZREM', base .. 'scopes:' .. duty, scope) end
  end
end

local function file(name, row)
  local shelf, due = shelf_of(row)
  redis.call('ZADD', base .. 'shelf:' .. shelf, due, name)
  local duty, at = asked_of(row)
  if duty then
    if duty == 'resumable' then redis.call('ZADD', base .. 'resumable', at, name) end
    if at ~= '+inf' then
      local scope = string.match(name, '^[^%z]*')
      redis.call('ZADD', base .. 'ask:' .. duty .. ':' .. scope, at, name)
      redis.call('ZADD', base .. 'scopes:' .. duty, 0, scope)
    end
  end
end
