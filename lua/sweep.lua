-- Clears the bits of a bounded number of blocks of a generation that ended, and frees its slot after the last one.
--
-- KEYS[1] holders  hash: block hash -> nibble string
-- KEYS[2] idle     sorted set: slots that no stream has; score 0 = to be swept, else free from that time in ms
-- KEYS[3] retired blocks of this slot, tier 0
-- KEYS[4] retired blocks of this slot, tier 1
-- KEYS[5] retired blocks of this slot, tier 2
-- KEYS[6] retired blocks of this slot, tier 3
-- ARGV[1] slot
-- ARGV[2] limit    blocks to clear in this call, at most 1000
-- ARGV[3] rest_ms  how long a swept slot rests before it is given out again
-- Returns {swept, more}: more is 1 while blocks are left
-- Effects: idempotent; O(limit · log blocks)
local holders, idle = KEYS[1], KEYS[2]
local slot, limit, rest_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if not limit or limit < 1 or limit > 1000 or not rest_ms then
  return redis.error_reply('WRARGV limit is 1 to 1000, rest_ms a number')
end
local state = redis.call('ZSCORE', idle, slot)
if not state or tonumber(state) ~= 0 then
  return {0, 0}
end

local byte, char, sub, floor = string.byte, string.char, string.sub, math.floor
local at = floor(tonumber(slot) / 2) + 1
local shift = tonumber(slot) % 2 == 1 and 16 or 1

local swept = 0
for tier = 0, 3 do
  local key = KEYS[3 + tier]
  local gone = redis.call('ZRANGE', key, '0', string.format('%d', limit - swept - 1))
  local g = #gone
  if g > 0 then
    local unit = 2 ^ tier * shift
    local known = {}
    local before = redis.call('HMGET', holders, unpack(gone, 1, g))
    local pairs_, p, dels, q = {}, 0, {}, 0
    for k = 1, g do
      local old = before[k]
      if old then
        local new = known[old]
        if new == nil then
          local v = byte(old, at)
          if v and floor(v / unit) % 2 == 1 then
            new = sub(old, 1, at - 1) .. char(v - unit) .. sub(old, at + 1)
            local n = #new
            while n > 0 and byte(new, n) == 0 do
              n = n - 1
            end
            new = sub(new, 1, n)
          else
            new = old
          end
          known[old] = new
        end
        if new == '' then
          q = q + 1
          dels[q] = gone[k]
        elseif new ~= old then
          p = p + 2
          pairs_[p - 1] = gone[k]
          pairs_[p] = new
        end
      end
    end
    if q > 0 then
      redis.call('HDEL', holders, unpack(dels, 1, q))
    end
    for e = 1, p, 1000 do
      local f = e + 999
      if f > p then
        f = p
      end
      redis.call('HSET', holders, unpack(pairs_, e, f))
    end
    redis.call('ZREMRANGEBYRANK', key, '0', string.format('%d', g - 1))
    swept = swept + g
    if swept >= limit then
      break
    end
  end
end

if redis.call('EXISTS', KEYS[3], KEYS[4], KEYS[5], KEYS[6]) > 0 then
  return {swept, 1}
end
local t = redis.call('TIME')
local free = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000) + rest_ms
redis.call('ZADD', idle, string.format('%.0f', free), slot)
return {swept, 0}
