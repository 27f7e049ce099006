-- Whether the audit of a key may be purged: the key is final, expired, or deleted.
local function is_over(name)
  local live = redis.call('HGET', base .. 'k:' .. name, 'live')
  local state = live and string.match(live, '^"([^"]*)"')
  return not live or state == 'completed' or state == 'failed' or state == 'expired'
end

local function name_in(line) return string.match(line, '\n(.*)$') end
