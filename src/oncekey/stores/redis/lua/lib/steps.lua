-- The steps of a key are one hash, '<base>s:<name>': 'n' is their number, '#<step>' the number of a step, and
-- '<number>:<field>' its fields. '<base>d:<downstream key>' and '<base>p:<provider id>' name the keys that carry one.
local STEP_FIELDS = {'name', 'kind', 'state', 'repeatable', 'result', 'down', 'provider'}

local function read_steps(name)
  local key = base .. 's:' .. name
  local steps = {}
  for number = 1, tonumber(redis.call('HGET', key, 'n') or 0) do
    local fields = {}
    for i, field in ipairs(STEP_FIELDS) do fields[i] = number .. ':' .. field end
    steps[number] = redis.call('HMGET', key, unpack(fields))
  end
  return steps
end

local function carriers(name, call)
  for _, step in ipairs(read_steps(name)) do
    if step[6] then call(base .. 'd:' .. step[6], name) end
    if step[7] then call(base .. 'p:' .. step[7], name) end
  end
end

local function forget_steps(name)
  if redis.call('EXISTS', base .. 's:' .. name) == 0 then return end
  carriers(name, function(key) redis.call('ZREM', key, name) end)
  redis.call('DEL', base .. 's:' .. name)
end

local function write_step(name, step)
  local key = base .. 's:' .. name
  carriers(name, function(index) redis.call('ZREM', index, name) end)
  local number = redis.call('HGET', key, '#' .. step.name)
  if not number then
    number = redis.call('HINCRBY', key, 'n', 1)
    redis.call('HSET', key, '#' .. step.name, number, number .. ':name', step.name, number .. ':kind', step.kind)
  end
  redis.call('HSET', key, number .. ':state', step.state, number .. ':repeatable', step.repeatable)
  for _, field in ipairs({'result', 'down', 'provider'}) do
    if step[field] then
      redis.call('HSET', key, number .. ':' .. field, step[field])
    elseif field ~= 'provider' then -- a provider's id is not forgotten
      redis.call('HDEL', key, number .. ':' .. field)
    end
  end
  carriers(name, function(index) redis.call('ZADD', index, 0, name) end)
end
