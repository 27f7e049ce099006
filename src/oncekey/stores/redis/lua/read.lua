-- #include common fields
-- The rows of these keys. KEYS: epochs, rows. Returns now, and for each row its fields, or nil if there is none.
local answer = {whole(now)}
for i = 1, ROWS do answer[i + 1] = full(KEYS[EPOCHS + i]) end
return answer
