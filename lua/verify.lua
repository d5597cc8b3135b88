-- Compares the nibble strings of some blocks with the sorted sets, and rebuilds those that differ where asked to.
--
-- KEYS[1] holders  hash: block hash -> nibble string
-- KEYS[2] version  integer, changed by every change of slots
-- KEYS[3..] sorted sets of block hashes, live and retired
-- ARGV[1] version  at which the caller read which sorted sets there are; "" = none
-- ARGV[2] repair   1 or 0
-- ARGV[3] members  number of block hashes
-- ARGV[4..] members, then one "slot:tier" for each sorted set
-- Returns {code, block hash...}: code 0 compared, the hashes are those that differed; 3 the version changed meanwhile
-- Effects: idempotent; O(members · sorted sets)
local holders, version = KEYS[1], KEYS[2]
local want, repair, n = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3])

if not n or n < 1 or n > 1000 or #ARGV ~= 3 + n + #KEYS - 2 then
  return redis.error_reply('WRARGV members is 1 to 1000, then the members and one slot:tier for each sorted set')
end
if (redis.call('GET', version) or '') ~= want then
  return {3}
end

local floor = math.floor
local members = {}
local bytes, length = {}, {}  -- per member: byte position -> value; highest position
for k = 1, n do
  members[k] = ARGV[3 + k]
  bytes[k], length[k] = {}, 0
end
for z = 3, #KEYS do
  local slot, tier = string.match(ARGV[3 + n + z - 2], '^(%d+):([0-3])$')
  if not slot then
    return redis.error_reply('WRARGV slot:tier expected')
  end
  local at = floor(tonumber(slot) / 2) + 1
  local unit = 2 ^ tonumber(tier) * (tonumber(slot) % 2 == 1 and 16 or 1)
  local scores = redis.call('ZMSCORE', KEYS[z], unpack(members, 1, n))
  for k = 1, n do
    if scores[k] then
      bytes[k][at] = (bytes[k][at] or 0) + unit
      if at > length[k] then
        length[k] = at
      end
    end
  end
end

local have = redis.call('HMGET', holders, unpack(members, 1, n))
local result = {0}
for k = 1, n do
  local t = {}
  for at = 1, length[k] do
    t[at] = string.char(bytes[k][at] or 0)
  end
  local right = table.concat(t)
  if right ~= (have[k] or '') then
    result[#result + 1] = members[k]
    if repair then
      if right == '' then
        redis.call('HDEL', holders, members[k])
      else
        redis.call('HSET', holders, members[k], right)
      end
    end
  end
end
return result
