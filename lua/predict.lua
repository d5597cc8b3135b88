-- Records what was routed to a worker rank, until it expires or the engine's own events say better, and forgets what has
-- expired, of this worker rank or of several.
--
-- KEYS[1] holders  hash: block hash -> nibble string
-- KEYS[2..] stream and predicted blocks (tier 3) of one worker rank after the other, at most 64; blocks are added to the first
-- ARGV[1] gen     generation that the caller believes in; "" = the one that is now
-- ARGV[2] ttl_ms  time until the blocks expire
-- ARGV[3] max     number of predicted blocks of a worker rank above which its oldest go; "" = any number
-- ARGV[4] target  number down to which they go
-- ARGV[5] limit   blocks to forget in this call, at most 1000
-- ARGV[6] from    position of the first block in its prompt
-- ARGV[7..] block hashes, at most 1000: consecutive blocks of the prompt
-- Returns {code, forgotten, more}: code 0 recorded, 3 stale (no such stream or generation; nothing recorded); more is 1 while
--         blocks are left that have expired or are too many
-- Effects: idempotent but for the clock; O((blocks + limit) · log predicted blocks + worker ranks). A block that the stream
--          holds on the device is known better and not predicted.
local holders = KEYS[1]
local gen, ttl, max, target, limit, from = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local n = #ARGV - 6
if #KEYS % 2 == 0 or #KEYS < 3 or #KEYS > 129 or n > 1000 or not ttl or ttl < 1 or not from or from < 0
  or not limit or limit < 1 or limit > 1000 or (ARGV[3] ~= '' and (not max or not target or target > max)) then
  return redis.error_reply('WRARGV want pairs of keys, ttl_ms, max and target or none, limit from 1 to 1000, from, and at most 1000 blocks')
end

local byte, char, sub, rep, floor = string.byte, string.char, string.sub, string.rep, math.floor
local call = redis.call
local t = call('TIME')
local now = tonumber(t[1]) * 1000 + floor(tonumber(t[2]) / 1000)

-- place is the byte and the bit that a slot's predictions have in a nibble string.
local function place(slot)
  return floor(slot / 2) + 1, slot % 2 == 1 and 128 or 8
end

local function add(predicted, slot)
  local at, unit = place(slot)
  local device = unit / 8
  local members = {}
  for k = 1, n do
    members[k] = ARGV[6 + k]
  end
  local before = call('HMGET', holders, unpack(members, 1, n))
  local fresh = rep('\0', at - 1) .. char(unit)
  local pairs_, p, scored, z = {}, 0, {}, 0
  for k = 1, n do
    local old = before[k]
    local v = old and byte(old, at) or 0
    if floor(v / device) % 2 == 0 then
      -- A block expires a little before the one that it follows, so that what is left is always a prefix. 1/4096 ms is what the score can tell.
      z = z + 2
      scored[z - 1] = string.format('%.6f', now + ttl - (from + k - 1) / 4096)
      scored[z] = members[k]
      if floor(v / unit) % 2 == 0 then
        p = p + 2
        pairs_[p - 1] = members[k]
        if not old then
          pairs_[p] = fresh
        elseif #old < at then
          pairs_[p] = old .. rep('\0', at - #old - 1) .. char(unit)
        else
          pairs_[p] = sub(old, 1, at - 1) .. char(v + unit) .. sub(old, at + 1)
        end
      end
    end
  end
  for a = 1, z, 1000 do
    call('ZADD', predicted, unpack(scored, a, a + 999 < z and a + 999 or z))
  end
  for a = 1, p, 1000 do
    call('HSET', holders, unpack(pairs_, a, a + 999 < p and a + 999 or p))
  end
end

-- forget takes the oldest blocks off, which have the lowest ranks.
local function forget(predicted, slot, count)
  local at, unit = place(slot)
  local gone = call('ZRANGE', predicted, '0', string.format('%d', count - 1))
  local before = call('HMGET', holders, unpack(gone, 1, count))
  local pairs_, p = {}, 0
  for k = 1, count do
    local old = before[k]
    local v = old and byte(old, at)
    if v and floor(v / unit) % 2 == 1 then
      local new = sub(old, 1, at - 1) .. char(v - unit) .. sub(old, at + 1)
      local m = #new
      while m > 0 and byte(new, m) == 0 do
        m = m - 1
      end
      if m == 0 then
        call('HDEL', holders, gone[k])
      else
        p = p + 2
        pairs_[p - 1] = gone[k]
        pairs_[p] = sub(new, 1, m)
      end
    end
  end
  for a = 1, p, 1000 do
    call('HSET', holders, unpack(pairs_, a, a + 999 < p and a + 999 or p))
  end
  call('ZREMRANGEBYRANK', predicted, '0', string.format('%d', count - 1))
end

local code, forgotten, more = 0, 0, 0
for k = 2, #KEYS, 2 do
  local stream, predicted = KEYS[k], KEYS[k + 1]
  local have = call('HMGET', stream, 'gen', 'slot')
  local slot = have[1] and tonumber(have[2])
  if k == 2 then
    if not slot or (gen ~= '' and have[1] ~= gen) then
      code = 3
    elseif n > 0 then
      add(predicted, slot)
    end
  end
  if slot then
    local count = call('ZCOUNT', predicted, '-inf', string.format('%.0f', now))
    if max then
      local held = call('ZCARD', predicted)
      if held > max and held - target > count then
        count = held - target
      end
    end
    if count > limit - forgotten then
      count, more = limit - forgotten, 1
    end
    if count > 0 then
      forget(predicted, slot, count)
      forgotten = forgotten + count
    end
  end
end
return {code, forgotten, more}
