-- Before every script. KEYS[1] is the epoch of a bucket. ARGV[1] is the epoch that the caller knows. With ARGV[2] = '1'
-- the caller asks WAIT next: the write below makes WAIT cover everything that this script reads.
if redis.replicate_commands then redis.replicate_commands() end -- before Redis 7: effects, because TIME is read
local base = string.sub(KEYS[1], 1, -6)
local epoch = redis.call('GET', KEYS[1])
if epoch ~= ARGV[1] then return redis.error_reply('ONCEKEY-EPOCH ' .. (epoch or '')) end
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
if ARGV[2] == '1' then redis.call('SET', base .. 'beat', clock[1]) end
-- Microseconds have 16 digits. tostring() would round them.
local function whole(number) return string.format('%.0f', number) end
