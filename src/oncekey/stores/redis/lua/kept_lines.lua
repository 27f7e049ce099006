-- #include common
-- A page of the audit, in the order of time and number. ARGV: time and number to go on after, how many. Returns pairs:
-- line, time. Lines of one moment are in the order of their numbers, which stand first in a line.
local from, last, most = ARGV[4], ARGV[5], tonumber(ARGV[6])
local ties = redis.call('ZCOUNT', base .. 'audit', from, from)
local found = redis.call('ZRANGEBYSCORE', base .. 'audit', from, '+inf', 'WITHSCORES', 'LIMIT', 0, most + ties)
local lines = {}
for i = 1, #found, 2 do
  local at = whole(tonumber(found[i + 1]))
  if #lines < most and (at ~= from or string.sub(found[i], 1, 16) > last) then lines[#lines + 1] = {found[i], at} end
end
return lines
