-- Append a batch to a thread's stream (rule 33): what is missing of it, or nothing. Every check stands before the first
-- write, and the first write is one that fails when Redis is out of memory (after any other it would not fail).
-- KEYS[1] events  KEYS[2] state  KEYS[3] writers
-- ARGV[1] writer  ARGV[2] its number of the first event  ARGV[3] fence 'turn number.attempt', or ''
-- ARGV[4] last id that the writer was given, or ''  ARGV[5] '1' if nothing was ever said in this thread
-- ARGV[6] TTL (s)  ARGV[7] writers remembered  ARGV[8] events kept  ARGV[9] bytes in a step  ARGV[10] full steps kept
-- ARGV[11..] source, uid, type, data, ts of each event, and '1' if its data was mended, else '0'
-- Returns the id of the last entry, or 'fenced'.
--
-- The ids are made here: seq runs on, the epoch is the time at which the stream was born. Where a stream is born again,
-- or is shorter than its writer knows it, a marker with a new epoch and a seq far above stands first, so that readers
-- see a gap. The bound in bytes is that of append.lua.
local function pair(text, pattern)
  local a, b = string.match(text, pattern)
  return tonumber(a), tonumber(b)
end
local function is_less(a, b, c, d)
  return a < c or (a == c and b < d)
end

local state = redis.call('HMGET', KEYS[2], ARGV[1], '.fence', '.bytes', '.steps')
if ARGV[3] ~= '' and state[2] then
  local number, attempt = pair(ARGV[3], '^(%d+)%.(%d+)$')
  if is_less(number, attempt, pair(state[2], '^(%d+)%.(%d+)$')) then return 'fenced' end
end
local first, done = tonumber(ARGV[2]), tonumber(state[1] or '0')
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local epoch, seq = 0, 0
local is_whole = false
if tail then
  epoch, seq = pair(tail[1], '^(%d+)-(%d+)$')
  is_whole = ARGV[4] == '' or not is_less(epoch, seq, pair(ARGV[4], '^(%d+)-(%d+)$'))
  if is_whole and first + (#ARGV - 10) / 6 - 1 <= done then return tail[1] end  -- a retry after a lost answer
end
if not is_whole then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  epoch = math.max(now, epoch + 1)
  if not tail then done, state = 0, {} end
  if tail or ARGV[5] ~= '1' then
    seq = math.max(now, seq + 1)
    -- '%.0f': Lua 5.1 would print a large number as 1.76e+15, which is no stream id.
    redis.call('XADD', KEYS[1], string.format('%.0f-%.0f', epoch, seq), 'marker', ARGV[1])
  end
end

local bytes, step, full = tonumber(state[3] or '0'), tonumber(ARGV[9]), {}
local id = string.format('%.0f-%.0f', epoch, seq)
for i = 11, #ARGV, 6 do
  local number = first + (i - 11) / 6
  if number > done then
    local source, uid, kind, data = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    seq = seq + 1
    id = string.format('%.0f-%.0f', epoch, seq)
    local fields = {'type', kind, 'data', data, 'source', source, 'uid', uid, 'ts', ARGV[i + 4]}
    if ARGV[i + 5] == '1' then
      fields[11], fields[12] = 'mended', '1'
    end
    redis.call('XADD', KEYS[1], id, unpack(fields))
    bytes = bytes + #source + #uid + #kind + #data + 32
    if bytes >= step then
      full[#full + 1] = id
      bytes = bytes - step
    end
    done = number
  end
end
local changed = {ARGV[1], string.format('%.0f', done), '.bytes', bytes}
if #full > 0 then
  local steps = {}
  for known in string.gmatch(state[4] or '', '%S+') do steps[#steps + 1] = known end
  for _, filled in ipairs(full) do steps[#steps + 1] = filled end
  local gone = #steps - tonumber(ARGV[10])
  if gone > 0 then redis.call('XTRIM', KEYS[1], 'MINID', steps[gone]) end
  changed[#changed + 1] = '.steps'
  changed[#changed + 1] = table.concat(steps, ' ', math.max(gone + 1, 1))
end
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[8])
if ARGV[3] ~= '' then
  changed[#changed + 1] = '.fence'
  changed[#changed + 1] = ARGV[3]
end
if not tail then redis.call('DEL', KEYS[2], KEYS[3]) end
redis.call('HSET', KEYS[2], unpack(changed))
redis.call('ZADD', KEYS[3], seq, ARGV[1])
local surplus = redis.call('ZCARD', KEYS[3]) - tonumber(ARGV[7])
if surplus > 0 then
  local forgotten = redis.call('ZPOPMIN', KEYS[3], surplus)
  for i = 1, #forgotten, 2 do redis.call('HDEL', KEYS[2], forgotten[i]) end
end
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ARGV[6]) end
return id
