-- #include common rows
-- The rows of these keys. KEYS: epoch, rows. Returns now, and for each row its fields, or nil if there is none.
local answer = {whole(now)}
for i = 2, #KEYS do
  local values = redis.call('HMGET', KEYS[i], unpack(FULL))
  answer[i] = values[4] and values or false
end
return answer
