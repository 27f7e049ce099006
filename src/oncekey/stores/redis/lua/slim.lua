-- #include common fields
-- As read.lua, without the responses.
local answer = {whole(now)}
for i = 1, ROWS do answer[i + 1] = slim(KEYS[EPOCHS + i]) end
return answer
