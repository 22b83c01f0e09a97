-- Publish a terminal record, wake its waiters, remove all that Redis holds of the job (rule 11). Idempotent, anyone's.
-- That it has ended is kept for a while, the outcome is not: of all outcomes of some minutes Redis would be full.
-- KEYS[1] jobs stream  KEYS[2] index  KEYS[3] result  KEYS[4] waiters  KEYS[5] presence  KEYS[6] cancels
-- ARGV[1] job  ARGV[2] group  ARGV[3] the record as JSON  ARGV[4] result TTL (s)  ARGV[5] prefix of reply streams
-- ARGV[6] largest record to copy into them  ARGV[7] their length  ARGV[8] their TTL (s)
-- Returns how many gateways were told.
redis.call('SET', KEYS[3], '1', 'EX', ARGV[4])
local gateways = redis.call('SMEMBERS', KEYS[4])
for _, gateway in ipairs(gateways) do
  local replies = ARGV[5] .. gateway
  local record = #ARGV[3] <= tonumber(ARGV[6]) and ARGV[3] or ''
  redis.call('XADD', replies, 'MAXLEN', '~', ARGV[7], '*', 'job', ARGV[1], 'record', record)
  redis.call('EXPIRE', replies, ARGV[8])
end
redis.call('DEL', KEYS[4])
redis.call('SREM', KEYS[6], ARGV[1])
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known then
  local id, bytes = string.match(known, '^(%S+) (%d+)$')
  redis.pcall('XACK', KEYS[1], ARGV[2], id)
  redis.call('XDEL', KEYS[1], id)
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HINCRBY', KEYS[2], 'bytes', -bytes)
end
if redis.call('XLEN', KEYS[1]) == 0 and redis.call('EXISTS', KEYS[5]) == 0 then
  redis.call('DEL', KEYS[1], KEYS[2])
end
return #gateways
