-- The fields of a row, and how a script answers them: as one JSON text, which is far cheaper to read than many values.
-- A response comes beside it, because a body may have any bytes.
local SLIM = {'operation', 'fixed', 'effects', 'state', 'attempt', 'owner', 'lease', 'point', 'error', 'ask', 'tries',
              'born', 'done', 'retention', 'expires'}

local function name_of(key) return string.sub(key, #base + 3) end

local function slim(key)
  local values = redis.call('HMGET', key, unpack(SLIM))
  return values[4] and cjson.encode(values)
end

local function full(key)
  local values = redis.call('HMGET', key, unpack(SLIM))
  if not values[4] then return false end
  local response = redis.call('HMGET', key, 'head', 'body')
  return {cjson.encode(values), response[1], response[2]}
end
