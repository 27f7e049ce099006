-- #include common fields
-- As read.lua, without the responses.
local answer = {whole(now)}
for i = 2, #KEYS do answer[i] = slim(KEYS[i]) end
return answer
