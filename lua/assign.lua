-- Finds or makes the place of a worker in a pool: its shard, and the pool's configuration.
--
-- KEYS[1] config    hash: block_size, shards
-- KEYS[2] workers   hash: worker -> shard
-- ARGV[1] block_size  tokens per block that the caller uses
-- ARGV[2] shards      how many shards a new pool gets at least
-- ARGV[3] worker      worker id
-- ARGV[4] shard       where a worker without a place goes; "" = to the shard with the fewest workers
-- Returns {code, block_size, shards, shard}: code 0 = placed, 1 = the pool has another block size
-- Effects: idempotent; O(workers of the pool) the first time a worker is seen, else O(1)
local config, workers = KEYS[1], KEYS[2]
local block_size, shards, worker, as_before = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local have = redis.call('HMGET', config, 'block_size', 'shards')
if have[1] and have[1] ~= block_size then
  return {1, have[1], have[2] or '0', '0'}
end
if have[2] then
  shards = have[2]
end
local n = tonumber(shards)
if not n or n < 1 or not tonumber(block_size) then
  return redis.error_reply('WRCONFIG block_size and shards must be positive numbers')
end

if not have[2] then  -- a new pool, or one that has lost its configuration and not its workers
  for _, v in ipairs(redis.call('HVALS', workers)) do
    local i = tonumber(v) or 0
    if i >= n and i < 1024 then
      n = i + 1
    end
  end
  shards = string.format('%d', n)
end

local shard = redis.call('HGET', workers, worker)
if not shard and tonumber(as_before) and tonumber(as_before) < n then
  shard = as_before
elseif not shard then
  local load = {}
  for i = 0, n - 1 do
    load[i] = 0
  end
  for _, v in ipairs(redis.call('HVALS', workers)) do
    local i = tonumber(v)
    load[i] = (load[i] or 0) + 1
  end
  local least = 0
  for i = 1, n - 1 do
    if load[i] < load[least] then
      least = i
    end
  end
  shard = string.format('%d', least)
end

redis.call('HSET', config, 'block_size', block_size, 'shards', shards)
redis.call('HSET', workers, worker, shard)
return {0, block_size, shards, shard}
