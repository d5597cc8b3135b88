-- Finds, and drops where asked to, what a worker rank left behind that has no stream.
--
-- KEYS[1] stream   hash: gen, or only removed_ms where the stream was removed
-- KEYS[2..] its blocks and copies, at most 100
-- ARGV[1] repair  1 or 0
-- Returns {found}: how many of the keys are there without a stream
-- Effects: idempotent; O(keys); Redis frees the memory in the background
local stream, repair = KEYS[1], ARGV[1] == '1'

if #KEYS < 2 or #KEYS > 101 then
  return redis.error_reply('WRARGV want 1 to 100 keys')
end
if redis.call('HGET', stream, 'gen') or (redis.call('EXISTS', stream) == 1 and not redis.call('HGET', stream, 'removed_ms')) then
  return {0}
end
local found = 0
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    found = found + 1
    if repair then
      redis.call('UNLINK', KEYS[i])
    end
  end
end
return {found}
