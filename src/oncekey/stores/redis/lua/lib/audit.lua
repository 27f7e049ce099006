-- Whether the audit of a key may be purged: the key is final, expired, or deleted.
local function is_over(name)
  local state = redis.call('HGET', base .. 'k:' .. name, 'state')
  return not state or state == 'completed' or state == 'failed' or state == 'expired'
end

local function name_in(line) return string.match(line, '\n(.*)$') end
