-- Chooses the cheapest of the candidates by the loads that all frontends share and, where an id is given, reserves it
-- there: one step, so that a burst sees its own choices. The same arithmetic is in package choose.
--
-- KEYS[1] load       hash: see leases.inc
-- KEYS[2] leases     hash
-- KEYS[3] deadlines  sorted set
-- KEYS[4] session    string: worker/rank that the session is at; only where the request has a session
-- ARGV[1] id             of the lease; '' = choose only
-- ARGV[2] lease_ms       how long it lives without being renewed
-- ARGV[3] tokens         of the prompt
-- ARGV[4] blocks         decode blocks to reserve
-- ARGV[5] block_size     tokens per block
-- ARGV[6] prefill_scale  weight of the work before a first token
-- ARGV[7] miss           weight of the prompt's own blocks in it
-- ARGV[8] decode         weight of a decode block
-- ARGV[9] request        weight of a request under way
-- ARGV[10] temperature   0 = take the cheapest
-- ARGV[11] random        0 to less than 1, decides between ties and the lottery
-- ARGV[12] busy_requests  a candidate at or above any of these three is skipped; 0 = no limit
-- ARGV[13] busy_tokens
-- ARGV[14] busy_blocks
-- ARGV[15] session_ms    how long a session lives without a request
-- ARGV[16] slack         by how much its worker may cost more than the cheapest
-- ARGV[17] most          leases that the pool may have
-- ARGV[18..] worker/rank, credit of each candidate; at most 4096 of them
-- Returns {code, index, at_home, held, cost, load...}: code 0 = chosen, 1 = all are busy; index from 0; at_home 1 = by its
-- session; held 1 = reserved; the loads of all candidates as they were found, '' for none
-- Effects: idempotent: the same id again returns the same choice; where that is no candidate any more, the lease
-- moves; O(candidates + log leases)
--#include leases.inc
local load, leases, deadlines, session = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, who_first = ARGV[1], 18
local lease_ms, tokens, blocks, block_size = number(ARGV[2], 1e9), number(ARGV[3], 1e9), number(ARGV[4], 1e9), number(ARGV[5], 1e6)
local prefill_scale, miss_weight, decode_weight = number(ARGV[6], 1e9), number(ARGV[7], 1e9), number(ARGV[8], 1e9)
local request_weight, temperature, random = number(ARGV[9], 1e9), number(ARGV[10], 1e9), number(ARGV[11], 1)
local busy_requests, busy_tokens, busy_blocks = number(ARGV[12], 1e15), number(ARGV[13], 1e15), number(ARGV[14], 1e15)
local session_ms, slack, most = number(ARGV[15], 1e12), number(ARGV[16], 1e15), number(ARGV[17], 1e9)

local n = (#ARGV - who_first + 1) / 2
if not (lease_ms and tokens and blocks and block_size and prefill_scale and miss_weight and decode_weight and request_weight and
    temperature and random and busy_requests and busy_tokens and busy_blocks and session_ms and slack and most) or
    block_size < 1 or #id > 128 or n < 1 or n > 4096 or n ~= math.floor(n) or (id ~= '' and lease_ms < 1) then
  return redis.error_reply('WRARGV a number is missing or out of range, or there are not 1 to 4096 candidates')
end
-- One pass over the candidates costs Redis most of what a selection costs: no calls in it that can be spared.
local tonumber, match = tonumber, string.match
local names, credits = {}, {}
local at = who_first
for i = 1, n do
  local credit = tonumber(ARGV[at + 1])
  if not (credit and credit >= 0 and credit <= 1e9) then
    return redis.error_reply('WRARGV a credit is a number of blocks')
  end
  names[i], credits[i] = ARGV[at], credit
  at = at + 2
end

local now = now_ms()
reap(load, leases, deadlines, now)

-- A repetition, after a reply that was lost or a worker that refused.
local again, again_home
if id ~= '' then
  local who, _, _, _, home = parse(redis.call('HGET', leases, id))
  if who then
    if tonumber(redis.call('ZSCORE', deadlines, id) or '0') > now then
      for i = 1, n do
        if names[i] == who then
          again, again_home = i, tonumber(home)
          break
        end
      end
    end
    if not again then
      free(load, leases, deadlines, id)
    end
  end
end

-- Giving the names to HMGET costs Redis more than taking the loads of some more worker ranks than those.
local loads = {}
if redis.call('HLEN', load) <= 4 * n then
  local all = redis.call('HGETALL', load)
  local by_name = {}
  for i = 1, #all, 2 do
    by_name[all[i]] = all[i + 1]
  end
  for i = 1, n do
    loads[i] = by_name[names[i]] or ''
  end
else
  for from = 1, n, 1000 do
    local to = math.min(from + 999, n)
    local some = redis.call('HMGET', load, unpack(names, from, to))
    for i = from, to do
      loads[i] = some[i - from + 1] or ''
    end
  end
end

local want = tokens / block_size
local limited = busy_requests > 0 or busy_tokens > 0 or busy_blocks > 0
local costs, cheapest, dearest = {}, math.huge, -math.huge
for i = 1, n do
  local r, p, d = 0, 0, 0
  if loads[i] ~= '' then
    r, p, d = match(loads[i], '^(%d+) (%d+) (%d+)$')
    if not r then
      return redis.error_reply('WRLOAD a load is three numbers')
    end
  end
  if limited and ((busy_requests > 0 and tonumber(r) >= busy_requests) or (busy_tokens > 0 and tonumber(p) >= busy_tokens) or
      (busy_blocks > 0 and tonumber(d) >= busy_blocks)) then
    costs[i] = false
  else
    local miss = want - credits[i]
    if miss < 0 then
      miss = 0
    end
    -- Text that stands for a number is one in arithmetic.
    local cost = prefill_scale * (p / block_size + miss_weight * miss) + decode_weight * d + request_weight * r
    costs[i] = cost
    if cost < cheapest then
      cheapest = cost
    end
    if cost > dearest then
      dearest = cost
    end
  end
end

local function answer(code, index, at_home, held, cost)
  local reply = {code, index, at_home, held, string.format('%.17g', cost)}
  for i = 1, n do
    reply[5 + i] = loads[i]
  end
  return reply
end

local chosen, at_home = again, again_home or 0
if not chosen and cheapest == math.huge then
  return answer(1, 0, 0, 0, 0)
end
if not chosen and session then
  local home = redis.call('GET', session)
  for i = 1, n do
    if names[i] == home and costs[i] and costs[i] <= cheapest + slack then
      chosen, at_home = i, 1
      break
    end
  end
end
if not chosen and temperature > 0 and dearest > cheapest then
  local span, sum = dearest - cheapest, 0
  local chances = {}
  for i = 1, n do
    if costs[i] then
      chances[i] = math.exp(-(costs[i] - cheapest) / span / temperature)
      sum = sum + chances[i]
    end
  end
  local left = random * sum
  for i = 1, n do
    if costs[i] then
      chosen = i
      left = left - chances[i]
      if left < 0 then
        break
      end
    end
  end
end
if not chosen then
  local ties = 0
  for i = 1, n do
    if costs[i] == cheapest then
      ties = ties + 1
    end
  end
  local left = math.min(math.floor(random * ties), ties - 1)
  for i = 1, n do
    if costs[i] == cheapest then
      if left == 0 then
        chosen = i
        break
      end
      left = left - 1
    end
  end
end

local held = again and 1 or 0
if id ~= '' and not again and redis.call('ZCARD', deadlines) < most then
  local prefill = math.ceil(math.max(0, tokens - credits[chosen] * block_size))
  add(load, names[chosen], 1, prefill, blocks)
  keep(leases, deadlines, id, now, names[chosen], prefill, blocks, lease_ms, string.format('%d', at_home))
  held = 1
end
if session and held == 1 and session_ms >= 1 then
  redis.call('SET', session, names[chosen], 'PX', string.format('%.0f', session_ms))
end
return answer(0, chosen - 1, at_home, held, costs[chosen] or 0)
