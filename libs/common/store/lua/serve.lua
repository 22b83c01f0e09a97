-- A session asserts itself (first, or at each heartbeat), then claims, then takes: rules 12, 13, 14, 14a.
-- KEYS[1] presence  KEYS[2] epoch  KEYS[3] tools  KEYS[4] born  KEYS[5] jobs stream  KEYS[6] index
-- KEYS[7] cancels
-- ARGV[1] epoch  ARGV[2] '1' for the first assert of a session  ARGV[3] machine  ARGV[4] worker  ARGV[5] session
-- ARGV[6] since (ms)  ARGV[7] last sign of life (ms)  ARGV[8] busy '0'|'1'  ARGV[9] presence TTL (ms)
-- ARGV[10] epoch TTL (s)  ARGV[11] group  ARGV[12] free places  ARGV[13] jobs in flight, joined by ' '
-- ARGV[14] number of this call  ARGV[15] ids of entries that this session cannot read, joined by ' '
-- ARGV[16..] tool name, 'h' | 'u', ...: the catalogue, when it is to be written
-- Returns {'outranked' | 'other', machine of the live presence} with nothing written, or
-- {'ok', tools missing, born, bodies left behind by the claim, {id, body, claimed '1'|'0', ...}, jobs to cancel}.
local mine = tonumber(ARGV[1])
local stored = tonumber(redis.call('GET', KEYS[2]) or '-1')
local live = redis.call('HGET', KEYS[1], 'machine')
if stored > mine then return {'outranked', live or ''} end
-- Given up by its caller and run after all: what it brought would be nobody's, what it says is old.
if stored == mine and tonumber(redis.call('HGET', KEYS[1], 'call') or '0') > tonumber(ARGV[14]) then
  return redis.error_reply('LATE a later serve of this session has run')
end
if ARGV[2] == '1' and live and live ~= ARGV[3] then return {'other', live} end
local time = redis.call('TIME')
redis.call('SET', KEYS[4], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 'NX')
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[10])
redis.call('HSET', KEYS[1], 'state', 'online', 'machine', ARGV[3], 'worker', ARGV[4], 'session', ARGV[5],
  'epoch', ARGV[1], 'since', ARGV[6], 'seen', ARGV[7], 'busy', ARGV[8], 'call', ARGV[14])
redis.call('PEXPIRE', KEYS[1], ARGV[9])
if #ARGV > 15 then
  redis.call('DEL', KEYS[3])
  for i = 16, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
local tools_known = redis.call('PEXPIRE', KEYS[3], ARGV[9])

local free, left, taken = tonumber(ARGV[12]), 0, {}
local function give(id, body, claimed)
  taken[#taken + 1] = id
  taken[#taken + 1] = body
  taken[#taken + 1] = claimed
  free = free - 1
end
-- As a settle does: else it would take a place at each claim. If its job is open, the sweeper puts it back.
local function remove(id, job)
  redis.call('XACK', KEYS[5], ARGV[11], id)
  redis.call('XDEL', KEYS[5], id)
  if job then
    local bytes = string.match(redis.call('HGET', KEYS[6], job), ' (%d+)$')
    redis.call('HDEL', KEYS[6], job)
    if bytes then redis.call('HINCRBY', KEYS[6], 'bytes', -bytes) end
  end
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  redis.pcall('XGROUP', 'CREATE', KEYS[5], ARGV[11], '0')
  local in_flight = {}
  for job in string.gmatch(ARGV[13], '%S+') do in_flight[job] = true end
  local unreadable = {}
  for id in string.gmatch(ARGV[15], '%S+') do unreadable[id] = true end
  -- Own entries too: the answer that brought them may have been lost.
  local claimed, cursor = {}, '0-0'
  repeat
    local page = redis.call('XAUTOCLAIM', KEYS[5], ARGV[11], ARGV[5], 0, cursor, 'COUNT', 200, 'JUSTID')
    cursor = page[1]
    for _, id in ipairs(page[2]) do claimed[#claimed + 1] = id end
  until cursor == '0-0'
  if #claimed > 0 then
    local job_of, index = {}, redis.call('HGETALL', KEYS[6])
    for i = 1, #index, 2 do
      local id = string.match(index[i + 1], '^(%d+%-%d+) ')
      if id then job_of[id] = index[i] end
    end
    for _, id in ipairs(claimed) do
      if unreadable[id] then
        remove(id, job_of[id])
      elseif not in_flight[job_of[id] or ''] then
        if free > 0 then
          local entry = redis.call('XRANGE', KEYS[5], id, id)[1]
          if entry then give(id, entry[2][4] or '', '1') end
        else
          left = left + 1
        end
      end
    end
  end
  -- Consumers of ended sessions hold nothing now; delete them (never one that holds something).
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[5], ARGV[11])) do
    if consumer[2] ~= ARGV[5] and consumer[4] == 0 then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[5], ARGV[11], consumer[2])
    end
  end
  if left == 0 and free > 0 then
    local read = redis.call('XREADGROUP', 'GROUP', ARGV[11], ARGV[5], 'COUNT', free, 'STREAMS', KEYS[5], '>')
    if read then for _, entry in ipairs(read[1][2]) do give(entry[1], entry[2][4] or '', '0') end end
  end
end
return {'ok', 1 - tools_known, redis.call('GET', KEYS[4]), left, taken,
  redis.call('SMEMBERS', KEYS[7])}
