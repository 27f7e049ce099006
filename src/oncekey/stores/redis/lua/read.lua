-- #include common fields
-- The rows of these keys. KEYS: epoch, rows. Returns now, and for each row its fields, or nil if there is none.
local answer = {whole(now)}
for i = 2, #KEYS do answer[i] = full(KEYS[i]) end
return answer
