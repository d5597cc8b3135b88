-- Makes a stream, with a slot and a generation, or finds it and updates its registration. A stream that was removed on
-- purpose comes back only when that is asked for. A stream whose hash alone was lost gets the slot that it had back: its
-- bits are there still.
--
-- KEYS[1] stream   hash: gen, seq, slot, epoch, digest, updated_ms and the registration's fields
-- KEYS[2] slots    hash: slot -> worker/rank, live ones only
-- KEYS[3] idle     sorted set: slots that no stream has; score 0 = to be swept, else free from that time in ms
-- KEYS[4] version  integer, changed by every change of slots
-- KEYS[5] top      integer: slots below it were given out
-- ARGV[1] worker/rank
-- ARGV[2] follow  1 = not where the stream was removed, and an endpoint that is registered stays; 0 = in any case
-- ARGV[3..] field, value of the registration, repeated
-- Returns {created, gen, seq, slot, epoch, digest}: created 1 or 0, 2 = the stream was removed and nothing is done, 3 = made in
--         the slot that it had before, and what is there has to be retired
-- Effects: idempotent; O(log slots), O(slots) where the stream is made
local stream, slots, idle, version, top = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local owner, follow = ARGV[1], ARGV[2]

--#include slots.inc

local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local now_ms = string.format('%.0f', now)

local have = redis.call('HMGET', stream, 'gen', 'seq', 'slot', 'epoch', 'digest', 'endpoint')
local created = 0
if not have[1] then
  if redis.call('HGET', stream, 'removed_ms') then
    if follow == '1' then
      return {2, '', '', '', '', ''}
    end
    redis.call('DEL', stream)
  end
  local slot, kept
  local map = redis.call('HGETALL', slots)
  for i = 2, #map, 2 do
    if map[i] == owner then
      slot, kept = map[i - 1], true
    end
  end
  if kept then
    redis.call('ZREM', idle, slot)
  else
    slot = give(slots, idle, top, now_ms)
  end
  -- A generation is also the version, and never older than the clock: it stays unique after the stream, or all of Redis, was deleted.
  local gen = tonumber(redis.call('GET', version) or '0') + 1
  if gen < now then
    gen = now
  end
  local gen_text = string.format('%.0f', gen)
  redis.call('SET', version, gen_text)
  redis.call('HSET', slots, slot, owner)
  redis.call('HSET', stream, 'gen', gen_text, 'seq', '-1', 'slot', slot, 'epoch', gen_text, 'digest', '')
  have = {gen_text, '-1', slot, gen_text, ''}
  created = kept and 3 or 1
end
redis.call('HSET', stream, 'updated_ms', now_ms)
-- Who only goes on following may have an older registration than the one that is there.
if follow ~= '1' or not have[6] or have[6] == '' then
  for i = 3, #ARGV, 2 do
    redis.call('HSET', stream, ARGV[i], ARGV[i + 1])
  end
end
return {created, have[1], have[2], have[3], have[4] or '', have[5] or ''}
