-- Renews a stream's lease.
--
-- KEYS[1] stream  hash: gen, updated_ms
-- ARGV[1] gen     generation that the caller believes in
-- ARGV[2] now_ms  the caller's clock
-- Returns {code}: code 0 renewed, 3 stale
-- Effects: idempotent; O(1)
local stream = KEYS[1]
local gen, now_ms = ARGV[1], ARGV[2]

if redis.call('HGET', stream, 'gen') ~= gen then
  return {3}
end
redis.call('HSET', stream, 'updated_ms', now_ms)
return {0}
