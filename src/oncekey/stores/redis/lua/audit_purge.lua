-- #include common audit
-- Delete these lines of the audit. ARGV from the fourth: the lines. Returns how many were deleted.
local deleted = 0
for i = 4, #ARGV do
  local name = name_in(ARGV[i])
  if is_over(name) then
    deleted = deleted + redis.call('ZREM', base .. 'audit', ARGV[i])
    redis.call('ZREM', base .. 'a:' .. name, ARGV[i])
  end
end
return deleted
