-- Append a batch to a run's stream (rules 21, 23, 24): all that is missing of it, or nothing. Every check stands before
-- the first write, and the first write is one that fails when Redis is out of memory.
-- KEYS[1] events  KEYS[2] resume points  KEYS[3] progress
-- ARGV[1] writer's epoch  ARGV[2] seq of the first event  ARGV[3] '1' if there is real work in it
-- ARGV[4] state in which the run ends with the last event, or ''  ARGV[5] TTL after the end (s)
-- ARGV[6] progress TTL (s)  ARGV[7] events kept  ARGV[8] bytes in a step  ARGV[9] full steps kept
-- ARGV[10] seqs of those whose data was mended, with spaces between
-- ARGV[11..] source, uid, type, data, ts of each event
-- Returns 'ok'; 'fenced' when a newer epoch has written; 'behind' when the tail that the writer left is gone.
--
-- The bound in bytes: whenever another step of bytes is full, the id that filled it is noted (`.steps`, oldest first;
-- `.bytes`: how full the next one is), and what lies before the newest note not kept is trimmed. So the stream holds the
-- full steps kept, one that fills, and two events; nothing is read to know it, and trimming by count only makes it less.
local epoch, first = tonumber(ARGV[1]), tonumber(ARGV[2])
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not tail then return 'behind' end
local tail_epoch, tail_seq = string.match(tail[1], '^(%d+)-(%d+)$')
tail_epoch, tail_seq = tonumber(tail_epoch), tonumber(tail_seq)
if tail_epoch > epoch then return 'fenced' end
if tail_epoch < epoch or tail_seq < first - 1 then return 'behind' end
local own = redis.call('HMGET', KEYS[2], '.bytes', '.steps', '.end')
local last = first + (#ARGV - 10) / 5 - 1
if tail_seq >= last then return 'ok' end  -- a retry after a lost answer, or a first try that arrives after it
if own[3] then return 'fenced' end

local bytes, step = tonumber(own[1] or '0'), tonumber(ARGV[8])
local full, points, changed, mended = {}, {}, {}, {}
for seq in string.gmatch(ARGV[10], '%d+') do mended[tonumber(seq)] = true end
for i = 11, #ARGV, 5 do
  local seq = first + (i - 11) / 5
  if seq > tail_seq then
    local source, uid, kind, data = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    -- '%.0f': Lua 5.1 would print a large number as 1.76e+15, which is no stream id.
    local id = ARGV[1] .. '-' .. string.format('%.0f', seq)
    if mended[seq] then
      redis.call('XADD', KEYS[1], id, 'type', kind, 'data', data, 'source', source, 'uid', uid, 'ts', ARGV[i + 4],
        'mended', '1')
    else
      redis.call('XADD', KEYS[1], id, 'type', kind, 'data', data, 'source', source, 'uid', uid, 'ts', ARGV[i + 4])
    end
    bytes = bytes + #source + #uid + #kind + #data + 32  -- 32: id, time and field names, about
    if bytes >= step then
      full[#full + 1] = id
      bytes = bytes - step
    end
    -- What the upstream sent moves its point; what we say about it does not (too_large stands for what it sent).
    if string.sub(kind, 1, 8) ~= 'towline.' or kind == 'towline.event.too_large' then
      local point = points[source]
      if not point then
        local count, known = string.match(redis.call('HGET', KEYS[2], source) or '0 ', '^(%d+) (.*)$')
        point = {tonumber(count), known}
        points[source] = point
      end
      point[1] = point[1] + 1
      if uid ~= '' then point[2] = uid end
    elseif kind == 'towline.source.ended' then
      changed[#changed + 1] = '.ended:' .. source
      changed[#changed + 1] = data
    end
  end
end
for source, point in pairs(points) do
  changed[#changed + 1] = source
  changed[#changed + 1] = string.format('%.0f', point[1]) .. ' ' .. point[2]
end
changed[#changed + 1] = '.bytes'
changed[#changed + 1] = bytes
if #full > 0 then
  local steps = {}
  for id in string.gmatch(own[2] or '', '%S+') do steps[#steps + 1] = id end
  for _, id in ipairs(full) do steps[#steps + 1] = id end
  local gone = #steps - tonumber(ARGV[9])
  if gone > 0 then redis.call('XTRIM', KEYS[1], 'MINID', steps[gone]) end
  changed[#changed + 1] = '.steps'
  changed[#changed + 1] = table.concat(steps, ' ', math.max(gone + 1, 1))
end
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[7])
if ARGV[4] ~= '' then
  changed[#changed + 1] = '.end'
  changed[#changed + 1] = ARGV[4]
end
redis.call('HSET', KEYS[2], unpack(changed))
if ARGV[4] ~= '' then
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  redis.call('EXPIRE', KEYS[2], ARGV[5])
end
if ARGV[3] == '1' then
  local time = redis.call('TIME')
  redis.call('SET', KEYS[3], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 'EX', ARGV[6])
end
return 'ok'
