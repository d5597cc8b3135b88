-- Changes leases: their phase, their length, their end. Every change but the end renews the lease by its own length.
--
-- KEYS[1] load       hash: see leases.inc
-- KEYS[2] leases     hash
-- KEYS[3] deadlines  sorted set
-- ARGV[1] op     prefilled = the prompt is computed; output = one more decode block; renew; free; probe = prove that writes work
-- ARGV[2..] ids  at most 1000
-- Returns {reaped, found...}: how many ended leases were freed before, 64 = perhaps more are left; for each id 1, or 0 = no such lease
-- Effects: idempotent but for output; O(ids · log leases). A renewal also finds that one of the keys was lost, O(workers), and then makes sums
-- and deadlines from the leases, O(leases · log leases): what counts heals by itself within a third of the leases' length
--#include leases.inc
local load, leases, deadlines = KEYS[1], KEYS[2], KEYS[3]
local op = ARGV[1]

if #ARGV > 1001 or (op ~= 'prefilled' and op ~= 'output' and op ~= 'renew' and op ~= 'free' and op ~= 'probe') then
  return redis.error_reply('WRARGV want prefilled, output, renew, free or probe, and at most 1000 ids')
end
local now = now_ms()
local reply = {reap(load, leases, deadlines, now)}
if op == 'renew' and compare(load, leases, deadlines) then
  restore(load, leases, deadlines, now)
end
if op == 'probe' then
  redis.call('HSET', leases, '', '')
  redis.call('HDEL', leases, '')
end
for i = 2, #ARGV do
  local id = ARGV[i]
  local who, tokens, blocks, ms, home = parse(redis.call('HGET', leases, id))
  local found = 0
  if who and tonumber(redis.call('ZSCORE', deadlines, id) or '0') <= now then
    free(load, leases, deadlines, id)
  elseif who then
    found = 1
    if op == 'free' then
      free(load, leases, deadlines, id)
    else
      if op == 'prefilled' and tokens > 0 then
        add(load, who, 0, -tokens, 0)
        tokens = 0
      elseif op == 'output' then
        add(load, who, 0, 0, 1)
        blocks = blocks + 1
      end
      keep(leases, deadlines, id, now, who, tokens, blocks, ms, home)
    end
  end
  reply[i] = found
end
return reply
