-- #include common fields steps
-- The steps of these keys. KEYS: epochs, rows. Returns now, and for each row a list of steps.
local answer = {whole(now)}
for i = 1, ROWS do answer[i + 1] = read_steps(enter(KEYS[EPOCHS + i])) end
return answer
