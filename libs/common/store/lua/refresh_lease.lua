-- Refresh a run's lease and compare the tail (rule 25).
-- KEYS[1] lease  KEYS[2] events  KEYS[3] resume points  KEYS[4] liveness  KEYS[5] status of its sources
-- ARGV[1] 'relay:epoch' of the owner  ARGV[2] its epoch  ARGV[3] seq of its tail  ARGV[4] lease TTL (ms)
-- ARGV[5] '1' if a frame came since the last refresh  ARGV[6] what it says of its sources
-- ARGV[7] TTL of liveness and status (s)
-- ARGV[8] TTL of stream and points (s)
-- Returns 'kept' (also when the lease was merely gone: it is put back); 'behind' when the tail that the owner left is
-- gone (the lease is kept for its new epoch); 'lost' when another has the lease or a newer epoch has written (released).
local lease = redis.call('GET', KEYS[1])
if lease and lease ~= ARGV[1] then return 'lost' end
local epoch = tonumber(ARGV[2])
local tail = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local tail_epoch, tail_seq = 0, 0
if tail then
  tail_epoch, tail_seq = string.match(tail[1], '^(%d+)-(%d+)$')
  tail_epoch, tail_seq = tonumber(tail_epoch), tonumber(tail_seq)
end
if tail_epoch > epoch then
  redis.call('DEL', KEYS[1])
  return 'lost'
end
-- PEXPIRE where it will do: unlike SET it works when Redis is out of memory, and then no run needs to move.
if lease then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4])
end
if tail_epoch < epoch or tail_seq < tonumber(ARGV[3]) then return 'behind' end
redis.call('EXPIRE', KEYS[2], ARGV[8])
redis.call('EXPIRE', KEYS[3], ARGV[8])
redis.pcall('SET', KEYS[5], ARGV[6], 'EX', ARGV[7])
if ARGV[5] == '1' then redis.pcall('SET', KEYS[4], '1', 'EX', ARGV[7]) end
return 'kept'
