-- #include common fields steps
-- The steps of these keys. KEYS: epoch, rows. Returns now, and for each row a list of steps.
local answer = {whole(now)}
for i = 2, #KEYS do answer[i] = read_steps(name_of(KEYS[i])) end
return answer
