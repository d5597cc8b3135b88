-- Compares the slot map with the streams, the idle slots and the version, and puts right what differs where asked to.
--
-- KEYS[1] slots    hash: slot -> worker/rank, live ones only
-- KEYS[2] idle     sorted set: slots that no stream has; score 0 = to be swept, else free from that time in ms
-- KEYS[3] version  integer, changed by every change of slots
-- KEYS[4] top      integer: slots below it were given out
-- KEYS[5..] four keys of retired blocks for each slot that may have any, then the streams that may be there
-- ARGV[1] repair   1 or 0
-- ARGV[2] retired  number of slots that may have retired blocks
-- ARGV[3..] these slots, then worker/rank for each stream
-- Returns {code, streams, kind, subject, other...}: code 0 compared, 3 the slot map names a worker/rank that the caller does not
--         know; streams is how many live ones there are; then three values for each difference. Kinds: slot_name (no number), slot_nobody (no such stream),
--         slot_other (the stream has slot other), gen, seq (lost: the caller has to restart the stream), slot (lost), unmapped (a stream missing from
--         the slot map), shared (the slot is other's), idle_name, idle_live (other has it), retired_live (blocks of an ended generation in
--         other's slot), retired_idle (they would never be swept), lost_slots (subject = how many are in neither map), top (lost or too low), version
-- Effects: idempotent; O(streams + slots)
local slots, idle, version, top = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local repair, retired = ARGV[1] == '1', tonumber(ARGV[2])

local first = retired and 5 + 4 * retired  -- of the streams
if not retired or retired < 0 or #KEYS < first - 1 or #ARGV ~= 2 + retired + #KEYS - first + 1 then
  return redis.error_reply('WRARGV want four keys for each slot and one for each stream, and their names')
end

local call = redis.call
local function number(text, digits)
  if text and #text <= digits and (text == '0' or string.match(text, '^[1-9]%d*$')) then
    return tonumber(text)
  end
end

local owners, keys = {}, {}  -- in the caller's order; worker/rank -> key
for i = first, #KEYS do
  local owner = ARGV[2 + retired + i - first + 1]
  owners[#owners + 1] = owner
  keys[owner] = KEYS[i]
end
local map = call('HGETALL', slots)
for i = 2, #map, 2 do
  if not keys[map[i]] then
    return {3, 0}
  end
end

local reply, changed = {0, 0}, false
local function found(kind, subject, other)
  reply[#reply + 1] = kind
  reply[#reply + 1] = subject
  reply[#reply + 1] = other or ''
  changed = true
end

-- What the streams say about themselves. One that was removed is only a mark.
local t = call('TIME')
local latest = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)  -- no generation is above it in the end
local live, streams, newest = {}, 0, 0
for _, owner in ipairs(owners) do
  local h = call('HMGET', keys[owner], 'gen', 'seq', 'slot', 'removed_ms')
  if h[1] or (not h[4] and call('EXISTS', keys[owner]) == 1) then
    local s = {gen = number(h[1], 16), seq = (h[2] == '-1' or number(h[2], 19)) and h[2], slot = number(h[3], 7)}
    live[owner] = s
    streams = streams + 1
    if not s.gen then
      found('gen', owner)
    elseif s.gen > newest then
      newest = s.gen
    end
    if not s.seq then
      found('seq', owner)
    end
    if not s.slot then
      found('slot', owner)
      s.slotless = true
    end
  end
end
reply[2] = streams
local have_version = number(call('GET', version), 16)
if streams > 0 and (not have_version or have_version < newest) then
  found('version', '')
end
if latest < newest then
  latest = newest
end
if have_version and latest < have_version then
  latest = have_version
end

-- Whose the slots are: what map and stream agree on first.
local holder, dropped = {}, {}
for i = 1, #map, 2 do
  local slot, owner = number(map[i], 7), map[i + 1]
  local s = live[owner]
  if not slot then
    found('slot_name', map[i])
  elseif not s then
    found('slot_nobody', map[i], owner)
  elseif not s.slot then
    s.slot, holder[slot] = slot, owner  -- the map remembers what the stream has lost
  elseif s.slot ~= slot then
    found('slot_other', map[i], owner)
  else
    holder[slot] = owner
  end
  if slot and holder[slot] ~= owner then
    dropped[slot] = true
  end
  if repair and not (slot and holder[slot] == owner) then
    call('HDEL', slots, map[i])
  end
end
local highest = -1
local function take(slot, owner)
  holder[slot] = owner
  if repair then
    call('HSET', slots, string.format('%d', slot), owner)
  end
end
local homeless = {}
for _, owner in ipairs(owners) do
  local s = live[owner]
  if s and s.slot and holder[s.slot] ~= owner then
    if holder[s.slot] then
      found('shared', owner, holder[s.slot])
      s.slot = nil
    else
      found('unmapped', owner)
      take(s.slot, owner)
    end
  end
  if s and not s.slot then
    homeless[#homeless + 1] = owner
  elseif s and s.slot > highest then
    highest = s.slot
  end
end

-- The idle ones.
local resting = {}
local scored = call('ZRANGE', idle, '0', '-1', 'WITHSCORES')
for i = 1, #scored, 2 do
  local slot = number(scored[i], 7)
  if not slot then
    found('idle_name', scored[i])
  elseif holder[slot] then
    found('idle_live', scored[i], holder[slot])
  else
    resting[slot] = tonumber(scored[i + 1])
    if slot > highest then
      highest = slot
    end
  end
  if repair and not (slot and resting[slot]) then
    call('ZREM', idle, scored[i])
  end
end
local function rest(slot)
  resting[slot] = 0
  if repair then
    call('ZADD', idle, '0', string.format('%d', slot))
  end
end
for r = 1, retired do
  local name, at = ARGV[2 + r], 4 * r + 1
  local slot = number(name, 7)
  if slot and call('EXISTS', KEYS[at], KEYS[at + 1], KEYS[at + 2], KEYS[at + 3]) > 0 then
    if holder[slot] then
      found('retired_live', name, holder[slot])
      if repair then
        call('UNLINK', KEYS[at], KEYS[at + 1], KEYS[at + 2], KEYS[at + 3])
      end
    elseif resting[slot] ~= 0 then
      found('retired_idle', name)
      rest(slot)
      if slot > highest then
        highest = slot
      end
    end
  end
end
local given = number(call('GET', top), 7) or 0
local short = given <= highest
if not short then
  highest = given - 1
end
local lost = 0
for slot = 0, math.min(highest, 65535) do
  if not holder[slot] and not resting[slot] then
    if not dropped[slot] then
      lost = lost + 1
    end
    rest(slot)
  end
end
if lost > 0 then
  found('lost_slots', string.format('%d', lost))
end
if short then
  found('top', '')
end

if repair and changed then
  -- Streams without a slot of their own get new ones: every number up to highest is somebody's or idle by now.
  for _, owner in ipairs(homeless) do
    highest = highest + 1
    live[owner].slot = highest
    take(highest, owner)
  end
  for _, owner in ipairs(owners) do
    local s = live[owner]
    if s and (not s.gen or not s.seq) then  -- who writes by the old state has to read it again
      latest = latest + 1
      call('HSET', keys[owner], 'gen', string.format('%.0f', latest))
    end
    if s and not s.seq then
      call('HSET', keys[owner], 'seq', '-1')
    end
    if s then
      call('HSET', keys[owner], 'slot', string.format('%d', s.slot))
    end
  end
  call('SET', version, string.format('%.0f', latest + 1))
  call('SET', top, string.format('%d', highest + 1))
end
return reply
