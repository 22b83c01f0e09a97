-- Put an accepted job before the user's machine; idempotent per job (rule 16), also used by the sweeper.
-- KEYS[1] jobs stream  KEYS[2] index  KEYS[3] waiters of the job  KEYS[4] presence  KEYS[5] result of the job
-- ARGV[1] job  ARGV[2] gateway that waits, or ''  ARGV[3] waiters' TTL (s)  ARGV[4] group  ARGV[5] user
-- ARGV[6] prefix of control streams  ARGV[7] their length  ARGV[8] their TTL (s)  ARGV[9] TTL of stream and index (s)
-- ARGV[10] body of the entry
-- Returns 'settled' when the job has ended already (read its record), 'known' when its entry is there, 'added'.
if ARGV[2] ~= '' then
  redis.call('SADD', KEYS[3], ARGV[2])
  redis.call('EXPIRE', KEYS[3], ARGV[3])
end
if redis.call('EXISTS', KEYS[5]) == 1 then return 'settled' end
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 'known' end
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[4], '0', 'MKSTREAM')
local id = redis.call('XADD', KEYS[1], '*', 'job', ARGV[1], 'body', ARGV[10])
local bytes = #ARGV[10] + #ARGV[1]
redis.call('HSET', KEYS[2], ARGV[1], id .. ' ' .. bytes)
redis.call('HINCRBY', KEYS[2], 'bytes', bytes)
redis.call('EXPIRE', KEYS[1], ARGV[9])
redis.call('EXPIRE', KEYS[2], ARGV[9])
local worker = redis.call('HGET', KEYS[4], 'worker')
if worker then
  local control = ARGV[6] .. worker
  redis.call('XADD', control, 'MAXLEN', '~', ARGV[7], '*', 'note', 'work', 'user', ARGV[5])
  redis.call('EXPIRE', control, ARGV[8])
end
return 'added'
