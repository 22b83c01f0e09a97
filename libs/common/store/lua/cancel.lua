-- Have a machine asked to stop a job: by a note to the worker that holds its socket, and by every session that asserts
-- itself until the job is settled. A note alone would be lost between two sockets.
-- KEYS[1] cancels  KEYS[2] presence  KEYS[3] result of the job
-- ARGV[1] job  ARGV[2] user  ARGV[3] TTL of the cancels (s)  ARGV[4] prefix of control streams  ARGV[5] their length
-- ARGV[6] their TTL (s)
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('SADD', KEYS[1], ARGV[1])
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
local worker = redis.call('HGET', KEYS[2], 'worker')
if worker then
  local control = ARGV[4] .. worker
  redis.call('XADD', control, 'MAXLEN', '~', ARGV[5], '*', 'note', 'cancel', 'user', ARGV[2], 'job', ARGV[1])
  redis.call('EXPIRE', control, ARGV[6])
end
