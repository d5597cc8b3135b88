-- Ends a stream's generation: all its blocks are gone from lookups at once. The stream goes on in a new
-- generation, in a new slot unless it held nothing, or ends for good.
--
-- KEYS[1] stream    hash: gen, seq, slot, epoch, digest, updated_ms and the registration
-- KEYS[2] slots     hash: slot -> worker/rank, live ones only
-- KEYS[3] idle      sorted set: slots that no stream has; score 0 = to be swept, else free from that time in ms
-- KEYS[4] version   integer, changed by every change of slots
-- KEYS[5] blocks of tier 0 (device)
-- KEYS[6] blocks of tier 1 (host)
-- KEYS[7] blocks of tier 2 (disk)
-- KEYS[8] blocks of tier 3 (predicted)
-- KEYS[9] copies of tier 0
-- KEYS[10] copies of tier 1
-- KEYS[11] copies of tier 2
-- KEYS[12] retired blocks of this slot, tier 0
-- KEYS[13] retired blocks of this slot, tier 1
-- KEYS[14] retired blocks of this slot, tier 2
-- KEYS[15] retired blocks of this slot, tier 3
-- KEYS[16] top      integer: slots below it were given out
-- ARGV[1] gen       generation that the caller believes in
-- ARGV[2] seq       watermark that the caller believes in; "" = any
-- ARGV[3] slot      slot that the retired keys are named after
-- ARGV[4] new_seq   watermark of the new generation; "-1" = a new engine process, which the epoch tells; "" = the stream ends
-- ARGV[5] worker/rank
-- ARGV[6] digest    of message new_seq; "" = unknown
-- Returns {code, gen, seq, slot, epoch, digest}: code 0 retired, 3 stale (nothing done); the rest is the state now, "" where the stream ended
-- Effects: idempotent (a repetition is stale); O(log slots), whatever the size of the cache
local stream, slots, idle, version, top = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[16]
local gen, seq, slot, new_seq, owner, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

--#include slots.inc

local have = redis.call('HMGET', stream, 'gen', 'seq', 'slot', 'epoch', 'digest')
if have[1] ~= gen or have[3] ~= slot or (seq ~= '' and have[2] ~= seq) then
  return {3, have[1] or '', have[2] or '', have[3] or '', have[4] or '', have[5] or ''}
end
local holder = redis.call('HGET', slots, slot)
if holder and holder ~= owner then  -- and must keep it
  return redis.error_reply('WRSLOT the stream has the slot of ' .. holder .. '; run check')
end

local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local now_ms = string.format('%.0f', now)

local empty = true
for tier = 0, 3 do
  if redis.call('EXISTS', KEYS[5 + tier]) == 1 then
    redis.call('RENAME', KEYS[5 + tier], KEYS[12 + tier])
    empty = false
  end
end
redis.call('UNLINK', KEYS[9], KEYS[10], KEYS[11])

local new_gen = tonumber(redis.call('GET', version) or '0') + 1
if new_gen < now then
  new_gen = now
end
local gen_text = string.format('%.0f', new_gen)
redis.call('SET', version, gen_text)
local epoch = new_seq == '-1' and gen_text or have[4] or ''

-- A stream that holds nothing has no bit anywhere and keeps its slot, or one that is reset again and again would use them up.
if empty and new_seq ~= '' then
  redis.call('HSET', stream, 'gen', gen_text, 'seq', new_seq, 'epoch', epoch, 'digest', digest, 'updated_ms', now_ms)
  return {0, gen_text, new_seq, slot, epoch, digest}
end

redis.call('HDEL', slots, slot)
if new_seq == '' then
  redis.call('ZADD', idle, '0', slot)
  redis.call('DEL', stream)
  -- A mark for a day: another indexer that follows the worker must not take this for lost data.
  redis.call('HSET', stream, 'removed_ms', now_ms)
  redis.call('PEXPIRE', stream, '86400000')
  return {0, '', '', '', '', ''}
end

local fresh = give(slots, idle, top, now_ms, slot)
redis.call('ZADD', idle, '0', slot)
redis.call('HSET', slots, fresh, owner)
redis.call('HSET', stream, 'gen', gen_text, 'seq', new_seq, 'slot', fresh, 'epoch', epoch, 'digest', digest, 'updated_ms', now_ms)
return {0, gen_text, new_seq, fresh, epoch, digest}
