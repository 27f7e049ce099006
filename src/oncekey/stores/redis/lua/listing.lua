-- #include common fields rows
-- Rows in the order of their names. ARGV: first and last name (as ZRANGEBYLEX takes them), how many names to look at, and
-- the filters: state, operation, age in microseconds; an empty one does not filter. Returns now, the name to go on after
-- (empty: there are no more), and for each row that meets the filters its name and fields.
local first, last, most, state, operation, age = unpack(ARGV, 4)
local names = redis.call('ZRANGEBYLEX', base .. 'names', first, last, 'LIMIT', 0, most)
local answer = {whole(now), #names == tonumber(most) and names[#names] or ''}
for _, name in ipairs(names) do
  local key = base .. 'k:' .. name
  local row = read(key)
  if row and (state == '' or row.state == state) and (operation == '' or operation_of(row) == operation)
     and (age == '' or now - row.born >= tonumber(age)) then
    answer[#answer + 1] = {name, slim(key)}
  end
end
return answer
