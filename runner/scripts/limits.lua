-- Unique names, rates, concurrency limits and lost nodes; stands between prelude.lua and the scripts that start and end jobs.
-- rf_flow of a job's hash says what was signed, a line each: "u UNTIL TTL_MS KEY", "r COUNT PERIOD_MS KEY" and
-- "c COUNT KEY". Admission compares the text with the envelope; here it is only never trusted to be well formed. Every
-- key lies below the tenant of the job's id (attack 56).

local MAX_COUNT, MAX_MS = 1000000, 31622400000
local LINE_TTL_S = 2592000
local SAMPLE, MOST_CALLED = 8, 64
-- A job in line for a place is looked at again after so long, should nobody have called it: seconds.
local LINE_S, LINE_MOST_S = 60, 3600
-- So long after it was due or called a job still goes before others; at least so long a rate lets it wait: milliseconds.
local PATIENCE_MS, AGAIN_MS = 10000, 200

local function within(text, most)
  local number = whole(text)
  return number and number >= 1 and number <= most and number or nil
end

-- What limits a job, or nil.
local function limits_of(id, text)
  if not text or text == '' then return nil end
  local tenant, found = tenant_of(id) .. ':', {}
  for line in string.gmatch(text, '[^\n]+') do
    local till, ttl, name = string.match(line, '^u (%l+) (%d+) (%S+)$')
    if till then
      found.till, found.ttl, found.unique = till, math.min(whole(ttl) or 0, MAX_MS), RF .. 'uniq:' .. tenant .. name
    end
    local count, period, rate = string.match(line, '^r (%d+) (%d+) (%S+)$')
    count, period = within(count, MAX_COUNT), within(period, MAX_MS)
    if count and period then
      found.most, found.period, found.starts, found.plan = count, period, RF .. 'rate:' .. tenant .. rate,
        RF .. 'plan:' .. tenant .. rate
    end
    local places, key = string.match(line, '^c (%d+) (%S+)$')
    places = within(places, MAX_COUNT)
    if places then
      found.places, found.held, found.line = places, RF .. 'conc:' .. tenant .. key, RF .. 'line:' .. tenant .. key
    end
  end
  return found
end

-- Who holds a unique name, or nil. A job that has ended, or was deleted, holds no name until its end.
local function holder_of(limits)
  local id = pcall_('GET', limits.unique)
  if not id or wrong(id) then return nil end
  if limits.till == 'ttl' then return id end
  local found = fields(RQ .. 'job:' .. id, 'rf_state')
  if not found or not found[1] or ENDED[found[1]] then return nil end
  return id
end

local function take_name(id, limits, not_after)
  local life = limits.ttl > 0 and limits.ttl or math.min(math.max(not_after - NOW_MS, 1000), 2 * MAX_MS)
  call('SET', limits.unique, id, 'PX', string.format('%d', life))
end

-- A job that starts near its not_after holds its name as long as it may run; paused it may until its not_after.
local function keep_name(id, limits, run_s, not_after)
  if limits.till ~= 'end' or limits.ttl > 0 or pcall_('GET', limits.unique) ~= id then return end
  local life = math.max(not_after - NOW_MS, 0) + run_s * 1000
  call('PEXPIRE', limits.unique, string.format('%d', math.min(life, 2 * MAX_MS)))
end

-- `now`: start or end.
local function drop_name(id, limits, now)
  if not limits.unique or limits.till == 'ttl' or (now == 'start' and limits.till ~= 'start') then return end
  if pcall_('GET', limits.unique) == id then call('DEL', limits.unique) end
end

-- Whether a job still waits where it was put aside. One that was killed does not, nor does one that no node took when it
-- was due or called: nobody waits for it.
local function still_waits(id)
  local found = fields(RQ .. 'job:' .. id, 'rf_state', 'rf_due', 'origin', 'rf_waits') or {}
  local waits = found[1] == 'scheduled' or found[1] == 'queued'
  return waits and (whole(found[2] or nil) or 0) + PATIENCE_MS >= NOW_MS, found
end

-- How many a limit put aside, without those of the first few that do not wait any more.
local function count_waiting(key)
  for _, id in ipairs(put('ZRANGE', key, 0, SAMPLE - 1)) do
    if not still_waits(id) then call('ZREM', key, id) end
  end
  return call('ZCARD', key)
end

-- When a job may start if its rate does not let it now. What counts is what really started, so that in no period more
-- than `most` do; and who was held back first, so that nobody is overtaken for ever.
local function rate_due(id, limits, seq)
  put('ZREMRANGEBYSCORE', limits.starts, '-inf', string.format('%d', NOW_MS - limits.period))
  -- Redis TIME went back: what lies ahead of it would stop everybody.
  put('ZREMRANGEBYSCORE', limits.starts, string.format('(%d', NOW_MS + 1000), '+inf')
  local started, waiting = put('ZCARD', limits.starts), count_waiting(limits.plan)
  local ahead = pcall_('ZRANK', limits.plan, id) or waiting
  if started + ahead < limits.most then return nil end
  put('ZADD', limits.plan, string.format('%d', seq), id)
  -- The start that has to lie a period back, and whole periods for those ahead.
  local place = limits.most - 1 - ahead % limits.most
  local base = tonumber(call('ZREVRANGE', limits.starts, place, place, 'WITHSCORES')[2] or nil) or NOW_MS - limits.period
  local due = base + limits.period * (1 + math.floor(ahead / limits.most))
  due = math.max(due, NOW_MS + math.min(limits.period, AGAIN_MS))
  call('PEXPIRE', limits.plan, string.format('%d', due - NOW_MS + limits.period + PATIENCE_MS))
  return due
end

local function count_start(id, limits, attempt)
  put('ZADD', limits.starts, string.format('%d', NOW_MS), id .. '.' .. string.format('%d', attempt))
  call('PEXPIRE', limits.starts, string.format('%d', limits.period))
end

-- Calls the first in line back to their lanes, until as many are there as places are free.
local function call_next(limits, free)
  for _, id in ipairs(free > 0 and put('ZRANGE', limits.line, 0, MOST_CALLED - 1) or {}) do
    local waits, found = still_waits(id)
    if not waits then
      call('ZREM', limits.line, id)
    else
      if found[1] == 'scheduled' and found[4] == 'concurrency' then
        local lane, key = found[3] or '', RQ .. 'job:' .. id
        stop_schedule(id, lane)
        call('HSET', key, 'status', 'queued', 'rf_state', 'queued', 'enqueued_at', NOW_ISO,
          'rf_due', string.format('%d', NOW_MS))
        put('LPUSH', RQ .. 'queue:' .. lane, id)
        wake(lane)
      end
      free = free - 1
      if free <= 0 then return end
    end
  end
end

-- Whether a place is free for a job, or it has one; those who were put aside before it go first. A place whose job is in
-- no node's hands (deleted) is given up.
local function place_for(id, limits)
  local held = put('SCARD', limits.held)
  if call('SISMEMBER', limits.held, id) == 1 then return true end
  for _, other in ipairs(held >= limits.places and call('SRANDMEMBER', limits.held, SAMPLE) or {}) do
    local found = fields(RQ .. 'job:' .. other, 'rf_state')
    if not found or not HELD[found[1] or ''] then held = held - call('SREM', limits.held, other) end
  end
  local free, waiting = limits.places - held, count_waiting(limits.line)
  if (pcall_('ZRANK', limits.line, id) or waiting) < free then return true end
  call_next(limits, free)
  return false
end

-- Lets a popped job start, or puts it aside: the jobs behind it in its lane do not wait for it. `run_s`: how long it may
-- run; `not_after`: Unix ms.
local function admit_start(id, key, lane, seq, attempt, run_s, not_after, limits)
  local due = limits.starts and rate_due(id, limits, seq)
  if due then
    call('HSET', key, 'rf_waits', 'rate')
    to_scheduled(id, key, lane, due)
    return false
  end
  if limits.held and not place_for(id, limits) then
    put('ZADD', limits.line, string.format('%d', seq), id)
    call('EXPIRE', limits.line, LINE_TTL_S)
    call('HSET', key, 'rf_waits', 'concurrency')
    local wait_s = math.min(LINE_S + call('ZCARD', limits.line), LINE_MOST_S)
    to_scheduled(id, key, lane, NOW_MS + wait_s * 1000)
    return false
  end
  if limits.starts then
    put('ZREM', limits.plan, id)
    count_start(id, limits, attempt)
  end
  if limits.held then
    put('SADD', limits.held, id)
    local life = run_s + LINE_TTL_S
    if call('TTL', limits.held) < life then call('EXPIRE', limits.held, string.format('%d', life)) end
    put('ZREM', limits.line, id)
    -- Of many places that were freed at once, each that is taken has the next one called.
    call_next(limits, limits.places - call('SCARD', limits.held))
  end
  if limits.unique then keep_name(id, limits, run_s, not_after) end
  return true
end

-- A job is in no node's hands any more.
local function free_place(id, limits)
  if not limits.held or pcall_('SREM', limits.held, id) ~= 1 then return end
  call_next(limits, limits.places - call('SCARD', limits.held))
end

-- A job leaves a node's hands, or its lane for good: its place is free, and if it has `ended` its name.
local function let_go(id, text, ended)
  local limits = limits_of(id, text)
  if not limits then return end
  free_place(id, limits)
  if ended then drop_name(id, limits, 'end') end
end

-- A job was marked as started.
local function begun(id, text)
  local limits = limits_of(id, text)
  if limits then drop_name(id, limits, 'start') end
end

-- Counts the nodes that a job took with it. A hint: without it the job runs as often as was signed. A call that is sent
-- again meets another fence, so nothing counts twice.
local MAX_CRASHES = 3
local function crashes(f, key)
  local count = (whole(fields(key, 'rf_crashes')[1] or nil) or 0) + 1
  call('HSET', key, 'rf_crashes', string.format('%d', count))
  return count
end
