-- Compares the sums of what is under way with the leases that they are made of.
--
-- KEYS[1] load       hash: see leases.inc
-- KEYS[2] leases     hash
-- KEYS[3] deadlines  sorted set
-- ARGV[1] repair  1 = where they differ, make the sums from the leases; what has the wrong type is dropped; 0 = only look
-- Returns {differ, requests, unreadable, leases, deadlines}: differ 0 or 1, 2 = a key has the wrong type; how many requests the sums have, how many
--         of them are no sums, and how many leases and deadlines there are
-- Effects: idempotent; O(workers), and O(leases · log leases) where it repairs
--#include leases.inc
local load, leases, deadlines = KEYS[1], KEYS[2], KEYS[3]
local repair = ARGV[1]

local function is(key, want)
  local kind = redis.call('TYPE', key)
  kind = kind.ok or kind
  return kind == want or kind == 'none'
end

if not (is(load, 'hash') and is(leases, 'hash') and is(deadlines, 'zset')) then
  if repair == '1' then
    redis.call('UNLINK', load, leases, deadlines)
  end
  return {2, 0, 0, 0, 0}
end
local differ, requests, unreadable, held, ends = compare(load, leases, deadlines)
if differ and repair == '1' then
  restore(load, leases, deadlines, now_ms())
end
return {differ and 1 or 0, requests, unreadable, held, ends}
