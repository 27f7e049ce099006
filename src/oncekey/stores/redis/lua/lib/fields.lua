-- A row is a hash, '<base>k:<name>', where name is scope .. '\0' .. key. Its fields:
--   fixed  what never changes while the row lives, as the caller wrote it: fingerprint, operation, version, recipe, quarantine
--   live   all other values, in the order of LIVE; times are whole microseconds
--   head, body  the response; a body may have any bytes
-- fixed and live are JSON arrays without their brackets. So a row is answered as it is stored, and read in one step.
local LIVE = {'state', 'owner', 'effects', 'attempt', 'tries', 'lease', 'born', 'point', 'error', 'ask', 'done', 'retention',
              'expires'}
local EPOCHS, ROWS = tonumber(ARGV[2]), #KEYS - ARGV[2] -- rows stand after the epochs in KEYS

-- Enter the bucket of a row, and return the row's name. No prefix has a brace, so the first one closes the hash tag.
local function enter(key)
  local tag = string.find(key, '}', 1, true)
  base = string.sub(key, 1, tag + 1)
  return string.sub(key, tag + 4)
end

local function text_of(fixed, live, head) return '[' .. fixed .. ',' .. live .. ',' .. (head or 'null') .. ']' end

-- The row as text without its response, or false if there is none.
local function slim(key)
  local row = redis.call('HMGET', key, 'fixed', 'live')
  return row[2] and text_of(row[1], row[2])
end

-- The row as text, and the body.
local function full(key)
  local row = redis.call('HMGET', key, 'fixed', 'live', 'head', 'body')
  return row[2] and {text_of(row[1], row[2], row[3]), row[4]}
end

local function values_of(live)
  local values, row = cjson.decode('[' .. live .. ']'), {}
  for i, field in ipairs(LIVE) do
    if values[i] ~= cjson.null then row[field] = values[i] end
  end
  return row
end

-- The live values of a row, and `fixed` among them; nil if there is none.
local function read(key)
  local found = redis.call('HMGET', key, 'fixed', 'live')
  if not found[2] then return nil end
  local row = values_of(found[2])
  row.fixed = found[1]
  return row
end

local function operation_of(row) return cjson.decode('[' .. row.fixed .. ']')[2] end

local function quoted(text) return text and cjson.encode(text) or 'null' end

local function number(value) return value and whole(value) or 'null' end

local function live_of(row)
  return table.concat({quoted(row.state), quoted(row.owner), quoted(row.effects), number(row.attempt), number(row.tries),
                       number(row.lease), number(row.born), quoted(row.point), quoted(row.error), number(row.ask),
                       number(row.done), number(row.retention), number(row.expires)}, ',')
end

-- Add to the list under a name; for commands that take many members at once.
local function add(lists, name, ...)
  local list = lists[name]
  if not list then
    list = {}
    lists[name] = list
  end
  for _, value in ipairs({...}) do list[#list + 1] = value end
end

local function call_each(command, lists)
  for name, members in pairs(lists) do redis.call(command, name, unpack(members)) end
end
