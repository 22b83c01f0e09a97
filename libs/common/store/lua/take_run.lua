-- Take a run over (rules 21, 22): lease free, mark above the tail, return the tail and the resume points.
-- Repeating it with the same epoch changes nothing.
-- KEYS[1] lease  KEYS[2] events  KEYS[3] resume points
-- ARGV[1] relay  ARGV[2] epoch  ARGV[3] lease TTL (ms)  ARGV[4] TTL of stream and points (s)
-- ARGV[5..] source, 'count uid', ...: points known to Postgres
-- Returns {'held', lease}; {'outranked'} when a newer epoch has written; or {'taken', id of the tail, seq before the
-- first event or '0' when it is gone, resume hash as a flat list, data of the last event if the run has ended or ''}.
local lease = redis.call('GET', KEYS[1])
if lease and string.match(lease, '^(.*):%d+$') ~= ARGV[1] then return {'held', lease} end
local epoch = tonumber(ARGV[2])
local tail = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local tail_id, first_seq, last_data = '', '0', ''
if tail then
  local tail_epoch, tail_seq = string.match(tail[1], '^(%d+)-(%d+)$')
  tail_epoch = tonumber(tail_epoch)
  if tail_epoch > epoch then return {'outranked'} end
  if redis.call('HEXISTS', KEYS[3], '.end') == 1 then
    -- Nothing follows the last event, no marker either: what is left to do concerns Postgres.
    tail_id, last_data = tail[1], tail[2][4]
  else
    tail_id = ARGV[2] .. '-' .. tail_seq
    if tail_epoch < epoch then redis.call('XADD', KEYS[2], tail_id, 'marker', ARGV[1]) end
    for i = 5, #ARGV, 2 do redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) end
  end
  local first = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
  if first[2][1] == 'marker' then first_seq = string.match(first[1], '%-(%d+)$') end
else
  -- Born empty. Above all that an earlier stream of this run can have numbered, also if this clock was set back.
  local time = redis.call('TIME')
  first_seq = string.format('%.0f', math.max(time[1] * 1000000 + time[2], epoch))
  tail_id = ARGV[2] .. '-' .. first_seq
  redis.call('XADD', KEYS[2], tail_id, 'marker', ARGV[1])  -- first: out of memory it fails, and nothing was done
  redis.call('DEL', KEYS[3])
  for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
if last_data == '' then
  redis.call('EXPIRE', KEYS[2], ARGV[4])
  redis.call('EXPIRE', KEYS[3], ARGV[4])
end
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], 'PX', ARGV[3])
return {'taken', tail_id, first_seq, redis.call('HGETALL', KEYS[3]), last_data}
