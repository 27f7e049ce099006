-- Before every script. KEYS begins with the epochs of all buckets that the script touches; ARGV[2] is their number. ARGV[1]
-- is the epoch that the caller knows. With ARGV[3] = '1' the caller asks WAIT next: the write below makes WAIT cover
-- everything that this script reads.
if redis.replicate_commands then redis.replicate_commands() end -- before Redis 7: effects, because TIME is read
for _, epoch in ipairs(redis.call('MGET', unpack(KEYS, 1, ARGV[2]))) do
  if epoch ~= ARGV[1] then return redis.error_reply('ONCEKEY-EPOCH ' .. (epoch or '')) end
end
local base = string.sub(KEYS[1], 1, -6) -- of the first bucket; a script for rows enters the bucket of each row
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if ARGV[3] == '1' then redis.call('SET', base .. 'beat', clock[1]) end
-- Microseconds have 16 digits. tostring() would round them.
local function whole(number) return string.format('%.0f', number) end
