-- Renews a stream's lease, and its place in the slot map, or the version, if that was lost: nothing else would bring it back.
--
-- KEYS[1] stream   hash: gen, slot, updated_ms
-- KEYS[2] slots    hash: slot -> worker/rank, live ones only
-- KEYS[3] version  integer, changed by every change of slots
-- ARGV[1] gen     generation that the caller believes in
-- ARGV[2] now_ms  the caller's clock
-- ARGV[3] worker/rank
-- Returns {code}: code 0 renewed, 3 stale
-- Effects: idempotent; O(1)
local stream, slots, version = KEYS[1], KEYS[2], KEYS[3]
local gen, now_ms, owner = ARGV[1], ARGV[2], ARGV[3]

local have = redis.call('HMGET', stream, 'gen', 'slot')
if have[1] ~= gen then
  return {3}
end
local now = redis.call('GET', version)
if have[2] and (not now or not redis.call('HGET', slots, have[2])) then
  if not redis.call('HGET', slots, have[2]) then
    redis.call('HSET', slots, have[2], owner)
  end
  local new = tonumber(now or '0') + 1
  if new < tonumber(gen) then
    new = tonumber(gen)
  end
  redis.call('SET', version, string.format('%.0f', new))
end
redis.call('HSET', stream, 'updated_ms', now_ms)
return {0}
