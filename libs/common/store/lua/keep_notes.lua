-- Remove the notes that their process has read, and put off the stream's expiry: what is kept is what came since.
-- KEYS[1] control or replies stream  ARGV[1] last id that was read  ARGV[2] TTL (s)
-- Returns how many were removed.
--
-- The last one read stays and is looked for first. Where it is missing, this is not the stream that was read: after a
-- Redis loss ids may begin anew below it, and nobody has read what has them.
local removed = 0
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 1 then
  removed = redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return removed
