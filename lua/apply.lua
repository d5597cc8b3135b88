-- Applies the operations of consecutive messages of one stream and moves its watermark, all or nothing.
--
-- KEYS[1] stream   hash: gen, seq, slot, digest, updated_ms, part = generation and last message of parts that were applied
-- KEYS[2] holders  hash: block hash -> nibble string
-- KEYS[3] blocks of tier 0 (device): sorted set, member = block hash, score = low 53 bits of the engine hash
-- KEYS[4] blocks of tier 1 (host)
-- KEYS[5] blocks of tier 2 (disk)
-- KEYS[6] copies of tier 0: hash, engine hash -> further physical copies
-- KEYS[7] copies of tier 1
-- KEYS[8] copies of tier 2
-- KEYS[9] blocks of tier 3 (predicted): those that the engine stores on the device, or removes, are predicted no longer
-- ARGV[1] gen      generation that the caller believes in
-- ARGV[2] first    sequence number of the first message
-- ARGV[3] last     sequence number of the last message
-- ARGV[4] flags    may contain f (apply over a gap), s (count no copies, nor those that were counted before), k (keep the watermark: what is stored comes from elsewhere than the stream)
--                  and p (a part that others follow: the watermark stays, and since it may be repeated no copies are counted)
-- ARGV[5] now_ms   the caller's clock, for updated_ms
-- ARGV[6] marks    "seq:index ..." the ARGV index at which each message's operations begin
-- ARGV[7] digest   of the last message, by which it is told from another one of the same number; "" = unknown
-- ARGV[8..] runs   "s0".."s2" (store on tier), "a0".."a2" (store, no further copy where it is there), "r0".."r2" (remove) or "x0".."x2" (remove, block hash known), count of
--                  values that follow, then the values: score, block hash for s, a and x; score for r.
--                  A block occurs once in a run. x trusts the caller's block hash where the tier holds that block.
-- Returns {code, seq}: code 0 applied, 1 duplicate, 2 gap (or blocks from before the first message), 3 stale; seq is the watermark now
-- Effects: idempotent (a repetition is a duplicate; with k or p, what is stored already); O(blocks · log blocks of the worker)
local stream, holders = KEYS[1], KEYS[2]
local blocks = {KEYS[3], KEYS[4], KEYS[5]}
local copies = {KEYS[6], KEYS[7], KEYS[8]}
local predicted = KEYS[9]
local gen, first, last, flags, now_ms, marks, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local CHUNK = 1000     -- values per command: unpack has a limit
local MAX_COPIES = 64  -- lost removals must not make a block immortal

local have = redis.call('HMGET', stream, 'gen', 'seq', 'slot', 'part')
if have[1] ~= gen then
  return {3, have[2] or '-1'}
end
local seq = tonumber(have[2])
local keep = string.find(flags, 'k', 1, true)
local part = string.find(flags, 'p', 1, true)
if not keep and tonumber(last) <= seq then
  return {1, have[2]}
end
if not keep and tonumber(first) > seq + 1 and not string.find(flags, 'f', 1, true) then
  return {2, have[2]}
end
local of, upto = string.match(have[4] or '', '^(%d+):(%d+)$')
local begun = of == gen and tonumber(upto) > seq  -- of what comes now parts may be there
if not keep and not begun and seq == -1 and not string.find(flags, 'f', 1, true) and redis.call('EXISTS', KEYS[3], KEYS[4], KEYS[5]) > 0 then
  return {2, have[2]}  -- a dump was loaded, or the stream's hash was lost: what is there is not what the messages go on from
end
local set = part or begun or string.find(flags, 's', 1, true)

-- Where another caller has applied the first messages already, begin after them.
local start = 8
if not keep and tonumber(first) <= seq then
  start = #ARGV + 1
  for s, at in string.gmatch(marks, '(%d+):(%d+)') do
    if tonumber(s) > seq then
      start = tonumber(at)
      break
    end
  end
end

-- Validate before the first write: a script error keeps what was written.
local i = 8
while i <= #ARGV do
  local n = tonumber(ARGV[i + 1])
  local op = ARGV[i]
  if not n or n < 1 or i + 1 + n > #ARGV or not string.find(op, '^[sarx][012]$') then
    return redis.error_reply('WRARGV a run is s, a, r or x and a tier from 0 to 2, a count, and that many values')
  end
  if string.byte(op) ~= 114 and n % 2 == 1 then
    return redis.error_reply('WRARGV a run of s, a or x has pairs of score and block hash')
  end
  i = i + 2 + n
end

local byte, char, sub, rep, floor = string.byte, string.char, string.sub, string.rep, math.floor
local call = redis.call
if not keep and string.find(flags, 's', 1, true) then
  call('UNLINK', KEYS[6], KEYS[7], KEYS[8])  -- counted before the worker was registered so: one removal has to be enough
end
local slot = tonumber(have[3])
local at = floor(slot / 2) + 1  -- byte of the nibble string that holds this slot: low nibble = even slot
local high = slot % 2 == 1
local guess = high and 128 or 8  -- the bit of a prediction

-- forget takes members off the predictions; their bits are gone already.
local function forget(members, m)
  for a = 1, m, CHUNK do
    call('ZREM', predicted, unpack(members, a, a + CHUNK - 1 < m and a + CHUNK - 1 or m))
  end
end

local function store(tier, from, to, count_copies)
  local unit = 2 ^ tier
  if high then
    unit = unit * 16
  end
  local fresh = rep('\0', at - 1) .. char(unit)
  local known = {}  -- nibble string before -> after; neighbours in a chain mostly have the same holders
  local foretold, moot, q = {}, {}, 0  -- nibble strings with a prediction that has come true; the blocks
  for a = from, to, CHUNK do
    local b = a + CHUNK - 1
    if b > to then
      b = to
    end
    local members, m = {}, 0
    for k = a + 1, b, 2 do
      m = m + 1
      members[m] = ARGV[k]
    end
    local before = call('HMGET', holders, unpack(members, 1, m))
    local pairs_, p = {}, 0
    for k = 1, m do
      local old = before[k]
      local new
      if not old then
        new = fresh
      else
        new = known[old]
        if new == nil then
          local n = #old
          if n < at then
            new = old .. rep('\0', at - n - 1) .. char(unit)
          else
            local v = byte(old, at)
            if floor(v / unit) % 2 == 1 then
              new = false
            else
              v = v + unit
              if tier == 0 and v >= guess and floor(v / guess) % 2 == 1 then
                v = v - guess
                foretold[old] = true
              end
              new = sub(old, 1, at - 1) .. char(v) .. sub(old, at + 1)
            end
          end
          known[old] = new
        end
        if foretold[old] then
          q = q + 1
          moot[q] = members[k]
        end
      end
      if new then
        p = p + 2
        pairs_[p - 1] = members[k]
        pairs_[p] = new
      elseif count_copies then
        -- Stored before. Under the same engine hash it is one more physical copy; under another one the newer hash wins.
        local score = ARGV[a + 2 * (k - 1)]
        local was = tonumber(call('ZSCORE', blocks[tier + 1], members[k]) or '-1')
        if was == tonumber(score) then
          local n = tonumber(call('HGET', copies[tier + 1], score) or '0')
          if n < MAX_COPIES then
            call('HINCRBY', copies[tier + 1], score, '1')
          end
        else
          call('HDEL', copies[tier + 1], string.format('%.0f', was))
        end
      end
    end
    call('ZADD', blocks[tier + 1], unpack(ARGV, a, b))
    if p > 0 then
      call('HSET', holders, unpack(pairs_, 1, p))
    end
  end
  forget(moot, q)
end

-- Takes members off a tier's sorted set and their bit, and that of a prediction, out of holders; before holds their nibble strings.
local function clear(key, unit, members, before, m)
  local known = {}
  local foretold, moot, w = {}, {}, 0
  for c = 1, m, CHUNK do
    local d = c + CHUNK - 1
    if d > m then
      d = m
    end
    local pairs_, p, dels, q = {}, 0, {}, 0
    for k = c, d do
      local old = before[k]
      if old then
        local new = known[old]
        if new == nil then
          local v = byte(old, at)
          if v and floor(v / unit) % 2 == 1 then
            v = v - unit
            if floor(v / guess) % 2 == 1 then
              v = v - guess
              foretold[old] = true
            end
            new = sub(old, 1, at - 1) .. char(v) .. sub(old, at + 1)
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
        if foretold[old] then
          w = w + 1
          moot[w] = members[k]
        end
        if new == '' then
          q = q + 1
          dels[q] = members[k]
        elseif new ~= old then
          p = p + 2
          pairs_[p - 1] = members[k]
          pairs_[p] = new
        end
      end
    end
    call('ZREM', key, unpack(members, c, d))
    if q > 0 then
      call('HDEL', holders, unpack(dels, 1, q))
    end
    for e = 1, p, CHUNK do
      local f = e + CHUNK - 1
      if f > p then
        f = p
      end
      call('HSET', holders, unpack(pairs_, e, f))
    end
  end
  forget(moot, w)
end

local function remove(tier, from, to, known)
  local key, copied_key = blocks[tier + 1], copies[tier + 1]
  local unit = 2 ^ tier
  if high then
    unit = unit * 16
  end
  local copied = call('EXISTS', copied_key) == 1
  local step = known and 2 or 1
  for a = from, to, CHUNK do
    local b = a + CHUNK - 1
    if b > to then
      b = to
    end
    -- One copy less where there are several; else the block goes.
    local scores, n = {}, 0
    local hints = {}
    for k = a, b, step do
      local score = ARGV[k]
      local left = copied and tonumber(call('HGET', copied_key, score) or '0') or 0
      if left > 1 then
        call('HINCRBY', copied_key, score, '-1')
      elseif left == 1 then
        call('HDEL', copied_key, score)
      else
        n = n + 1
        scores[n] = score
        if known then
          hints[n] = ARGV[k + 1]
        end
      end
    end
    -- The caller's memory holds where the tier has that block; the others are looked for by score.
    local gone, before, g = {}, {}, 0
    local lost, l = scores, n
    local wrong, had, w = {}, {}, 0  -- no such block, but a prediction of it
    if known and n > 0 then
      lost, l = {}, 0
      local held = call('HMGET', holders, unpack(hints, 1, n))
      for k = 1, n do
        local v = held[k] and byte(held[k], at) or 0
        if floor(v / unit) % 2 == 1 then
          g = g + 1
          gone[g], before[g] = hints[k], held[k]
        else
          l = l + 1
          lost[l] = scores[k]
          if v >= guess and floor(v / guess) % 2 == 1 then
            w = w + 1
            wrong[w], had[w] = hints[k], held[k]
          end
        end
      end
    end
    clear(key, unit, gone, before, g)
    clear(predicted, guess, wrong, had, w)
    gone, g = {}, 0
    for k = 1, l do
      local found = call('ZRANGEBYSCORE', key, lost[k], lost[k])
      for f = 1, #found do
        g = g + 1
        gone[g] = found[f]
      end
    end
    for c = 1, g, CHUNK do
      local d = c + CHUNK - 1
      if d > g then
        d = g
      end
      local part, m = {}, 0
      for k = c, d do
        m = m + 1
        part[m] = gone[k]
      end
      clear(key, unit, part, call('HMGET', holders, unpack(part, 1, m)), m)
    end
  end
end

i = 8
while i <= #ARGV do
  local op, n = ARGV[i], tonumber(ARGV[i + 1])
  local from, to = i + 2, i + 1 + n
  i = to + 1
  if to >= start then
    if from < start then
      from = start
    end
    local tier = byte(op, 2) - 48
    local kind = byte(op)
    if kind == 115 or kind == 97 then
      store(tier, from, to, kind == 115 and not set)
    else
      remove(tier, from, to, kind == 120)
    end
  end
end
if keep or part then
  call('HSET', stream, 'updated_ms', now_ms)
  if not keep and not (begun and tonumber(upto) >= tonumber(last)) then
    call('HSET', stream, 'part', gen .. ':' .. last)
  end
  return {0, have[2]}
end
call('HSET', stream, 'seq', last, 'digest', digest, 'updated_ms', now_ms)
return {0, last}
