-- A session ends; only the newest may say so.
-- KEYS[1] presence  KEYS[2] epoch  KEYS[3] tools  KEYS[4] jobs stream  KEYS[5] index
-- ARGV[1] epoch  ARGV[2] 'goodbye' or the grace in ms during which the machine counts as reconnecting
-- Returns 1 when something was written.
if redis.call('GET', KEYS[2]) ~= ARGV[1] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
if ARGV[2] == 'goodbye' then
  redis.call('DEL', KEYS[1], KEYS[3])
  if redis.call('XLEN', KEYS[4]) == 0 then redis.call('DEL', KEYS[4], KEYS[5]) end
else
  redis.call('HSET', KEYS[1], 'state', 'reconnecting')
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[3], ARGV[2])
end
return 1
