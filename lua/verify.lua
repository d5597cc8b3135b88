-- Compares one bit of the nibble strings of some blocks with the sorted set that it stands for, and puts it right where asked to.
--
-- KEYS[1] holders  hash: block hash -> nibble string
-- KEYS[2] version  integer, changed by every change of slots
-- KEYS[3] sorted set of block hashes of one slot and tier, live or retired; none is an empty one
-- ARGV[1] version  at which the caller read whose the slot is; "" = none
-- ARGV[2] repair   1 or 0
-- ARGV[3] slot
-- ARGV[4] tier     0 to 3
-- ARGV[5..] block hashes, at most 1000
-- Returns {code, block hash...}: code 0 compared, the hashes are those that differed; 3 the version changed meanwhile
-- Effects: idempotent; O(block hashes)
local holders, version, blocks = KEYS[1], KEYS[2], KEYS[3]
local want, repair, slot, tier = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3]), tonumber(ARGV[4])

local n = #ARGV - 4
if n < 1 or n > 1000 or not slot or slot < 0 or slot > 1048576 or not tier or tier < 0 or tier > 3 then
  return redis.error_reply('WRARGV want a slot, a tier from 0 to 3 and 1 to 1000 block hashes')
end
if (redis.call('GET', version) or '') ~= want then
  return {3}
end

local byte, char, sub, rep, floor = string.byte, string.char, string.sub, string.rep, math.floor
local at = floor(slot / 2) + 1
local unit = 2 ^ tier * (slot % 2 == 1 and 16 or 1)
local members = {}
for k = 1, n do
  members[k] = ARGV[4 + k]
end
local scores = redis.call('ZMSCORE', blocks, unpack(members, 1, n))
local have = redis.call('HMGET', holders, unpack(members, 1, n))
local result = {0}
for k = 1, n do
  local old = have[k] or ''
  local v = byte(old, at) or 0
  local new = old
  local is, should = floor(v / unit) % 2 == 1, scores[k] and true or false
  if should and not is then
    new = sub(old, 1, at - 1) .. rep('\0', at - 1 - #old) .. char(v + unit) .. sub(old, at + 1)
  elseif is and not should then
    new = sub(old, 1, at - 1) .. char(v - unit) .. sub(old, at + 1)
  end
  local m = #new
  while m > 0 and byte(new, m) == 0 do
    m = m - 1
  end
  new = sub(new, 1, m)
  if new ~= (have[k] or new) or (have[k] and new == '') or is ~= should then
    result[#result + 1] = members[k]
    if repair then
      if new == '' then
        redis.call('HDEL', holders, members[k])
      else
        redis.call('HSET', holders, members[k], new)
      end
    end
  end
end
return result
