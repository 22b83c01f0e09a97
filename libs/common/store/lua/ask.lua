-- What the door must know of a user's machine, in one look.
-- KEYS[1] presence  KEYS[2] tools  KEYS[3] jobs stream  KEYS[4] index  KEYS[5] born
-- ARGV[1] tool name
-- Returns {presence as flat list, 'h' | 'u' | '', entries, bytes, age of this Redis in ms}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[5], string.format('%.0f', now), 'NX')
local born = tonumber(redis.call('GET', KEYS[5]))
return {
  redis.call('HGETALL', KEYS[1]),
  redis.call('HGET', KEYS[2], ARGV[1]) or '',
  redis.call('XLEN', KEYS[3]),
  tonumber(redis.call('HGET', KEYS[4], 'bytes') or '0'),
  now - born,
}
