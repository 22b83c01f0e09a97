-- Take new entries for a session: the fence, then the read (rule 12). Moves nothing unless the epoch is the caller's,
-- and no later serve of the session has run (rule 13).
-- KEYS[1] epoch  KEYS[2] jobs stream  KEYS[3] presence
-- ARGV[1] epoch  ARGV[2] group  ARGV[3] session  ARGV[4] free places  ARGV[5] number of this call
-- Returns {'refused'} or {'ok', {id, body, ...}}.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'refused'} end
if tonumber(redis.call('HGET', KEYS[3], 'call') or '0') > tonumber(ARGV[5]) then return {'refused'} end
local taken = {}
local read = redis.pcall('XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', ARGV[4], 'STREAMS', KEYS[2], '>')
if read and read.err then
  if redis.call('EXISTS', KEYS[2]) == 0 then return {'ok', taken} end
  redis.call('XGROUP', 'CREATE', KEYS[2], ARGV[2], '0')
  read = redis.call('XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', ARGV[4], 'STREAMS', KEYS[2], '>')
end
if read then
  for _, entry in ipairs(read[1][2]) do
    taken[#taken + 1] = entry[1]
    taken[#taken + 1] = entry[2][4] or ''
  end
end
return {'ok', taken}
