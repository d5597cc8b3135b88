-- Compares the sums of what is under way with the leases that they are made of.
--
-- KEYS[1] load       hash: see leases.inc
-- KEYS[2] leases     hash
-- KEYS[3] deadlines  sorted set
-- ARGV[1] repair  1 = where they differ, drop all of it; 0 = only look
-- Returns {differ, requests, unreadable, leases, deadlines}: differ 0 or 1, 2 = a key has the wrong type; how many requests the sums have, how many
--         of them are no sums, and how many leases and deadlines there are
-- Effects: idempotent; O(workers)
local load, leases, deadlines = KEYS[1], KEYS[2], KEYS[3]
local repair = ARGV[1]

local function is(key, want)
  local kind = redis.call('TYPE', key)
  kind = kind.ok or kind
  return kind == want or kind == 'none'
end

local reply = {2, 0, 0, 0, 0}
if is(load, 'hash') and is(leases, 'hash') and is(deadlines, 'zset') then
  local requests, unreadable = 0, 0
  local all = redis.call('HGETALL', load)
  for i = 2, #all, 2 do
    local r = string.match(all[i], '^(%d+) %d+ %d+$')
    requests = requests + tonumber(r or '0')
    if not r then
      unreadable = unreadable + 1
    end
  end
  reply = {0, requests, unreadable, redis.call('HLEN', leases), redis.call('ZCARD', deadlines)}
  if unreadable > 0 or reply[2] ~= reply[4] or reply[4] ~= reply[5] then
    reply[1] = 1
  end
end
if reply[1] > 0 and repair == '1' then
  redis.call('UNLINK', load, leases, deadlines)
end
return reply
