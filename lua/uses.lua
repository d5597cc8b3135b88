-- Counts a use of a prompt's blocks, and says how often each was used before, within the window.
--
-- KEYS[1] first hash of a ring of five: block hash -> uses in one quarter of the window; field '' = which quarter it is
-- KEYS[2..] the others: four hold the window, the fifth is the next to be overwritten
-- ARGV[1] width_ms  a quarter of the window
-- ARGV[2] limit     blocks that one quarter may count; those beyond are not counted
-- ARGV[3..] block hashes, at most 1000
-- Returns {uses...}: for each block, in the last three quarters and the one that has begun, this use left out
-- Effects: not idempotent, each call is a use; O(block hashes). The hashes expire by themselves; where another window was counted before, nothing is until then.
local width, limit = tonumber(ARGV[1]), tonumber(ARGV[2])

local n = #ARGV - 2
if #KEYS ~= 5 or not width or width < 1 or not limit or n < 0 or n > 1000 then
  return redis.error_reply('WRARGV want five keys, the width of a quarter, a limit and at most 1000 blocks')
end
if n == 0 then
  return {}
end
local members, uses = {}, {}
for k = 1, n do
  members[k], uses[k] = ARGV[2 + k], 0
end
local t = redis.call('TIME')
local quarter = math.floor((tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)) / width)
for back = 3, 0, -1 do
  local key = KEYS[(quarter - back) % 5 + 1]
  local name = string.format('%.0f/%.0f', quarter - back, width)
  local quarter_of = redis.call('HGET', key, '')
  local known = quarter_of == name
  if back == 0 and not quarter_of then
    -- It lives as long as the window needs it, and is gone when its turn comes again.
    redis.call('HSET', key, '', name)
    redis.call('PEXPIRE', key, string.format('%.0f', 4 * width))
    known = true
  end
  if known then
    local before = redis.call('HMGET', key, unpack(members, 1, n))
    local room = back == 0 and limit + 1 - redis.call('HLEN', key) or 0
    local pairs_, p = {}, 0
    for k = 1, n do
      uses[k] = uses[k] + (tonumber(before[k] or '0') or 0)
      if back == 0 and (before[k] or room > 0) then
        if not before[k] then
          room = room - 1
        end
        p = p + 2
        pairs_[p - 1] = members[k]
        pairs_[p] = string.format('%.0f', (tonumber(before[k] or '0') or 0) + 1)
      end
    end
    for a = 1, p, 1000 do
      redis.call('HSET', key, unpack(pairs_, a, a + 999 < p and a + 999 or p))
    end
  end
end
return uses
