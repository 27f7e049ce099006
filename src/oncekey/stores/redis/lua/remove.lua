-- #include common fields rows steps
-- Delete rows that are past their time. ARGV from the fourth: '<shelf> <name>'. Returns how many were deleted.
local deleted = 0
for i = 4, #ARGV do
  local shelf, name = string.match(ARGV[i], '^(%S+) (.*)$')
  local row = read(base .. 'k:' .. name)
  if row then
    local stands, due = shelf_of(row)
    if stands == shelf and tonumber(due) <= now then
      forget_steps(name)
      unfile(name, row)
      redis.call('DEL', base .. 'k:' .. name)
      redis.call('ZREM', base .. 'names', name)
      deleted = deleted + 1
    end
  end
end
return deleted
