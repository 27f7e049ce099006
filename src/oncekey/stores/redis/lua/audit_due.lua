-- #include common audit
-- The oldest lines of the audit that may be purged. ARGV: age in microseconds, how many. Returns pairs: line, time.
local lines, from, most = {}, 0, tonumber(ARGV[5])
while #lines < most do
  local found = redis.call('ZRANGEBYSCORE', base .. 'audit', '-inf', whole(now - ARGV[4]), 'WITHSCORES', 'LIMIT', from, 500)
  for i = 1, #found, 2 do
    if #lines < most and is_over(name_in(found[i])) then
      lines[#lines + 1] = {found[i], whole(tonumber(found[i + 1]))}
    end
  end
  if #found < 1000 then break end
  from = from + 500
end
return lines
