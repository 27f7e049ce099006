-- #include common rows
-- As read.lua, without the responses.
local answer = {whole(now)}
for i = 2, #KEYS do
  local values = redis.call('HMGET', KEYS[i], unpack(SLIM))
  answer[i] = values[4] and values or false
end
return answer
