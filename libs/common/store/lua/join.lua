-- A relay says that it lives, and learns which others do. By this Redis's clock alone.
-- KEYS[1] members
-- ARGV[1] relay  ARGV[2] how long one is taken to live without saying so again (ms)  ARGV[3] TTL of the key (s)
-- Returns the living.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', now - ARGV[2]))
-- Said before this clock was set back: nobody would ever outlive it.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now + ARGV[2]), '+inf')
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return redis.call('ZRANGE', KEYS[1], 0, -1)
