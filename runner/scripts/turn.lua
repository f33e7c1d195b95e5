-- One loop turn of a node agent: finishes what is done, marks what has started, claims for the free slots.
--
-- KEYS   1 rf:seq   2 rf:leases   3 rf:claims:NODE/BOOT   4 rf:clock   5 rf:cut   6+ rq:queue:LANE, as in `lanes`
-- ARGV   1  {rq, rf, node, boot, ttl, cap, bytes, budget, known, held, finishes, starts, free, lanes, points}
--           ttl: seconds that ends are kept; cap: most bytes of one payload; bytes: of all payloads together
--           budget: most ids taken from lanes; known: {table: version} of the cutoff tables that the agent has
--           held: every job that the agent knows to hold (absent: unknown), those in finishes included
--           fence = {job, attempt, slot ("-" for none), execution (""), lane, worker ("")}
--           finishes: [fence + {kind: end|retry|release, state, reason, status, registry, type, started, wall,
--             value, failure, outcome, osig, event, esig, delay, crash}]  (value, failure, outcome, event: numbers of
--             ARGV, 0 = none; delay: ms until a retry, 0 = at once, at the head of its lane; crash: 1 = its node was lost)
--           starts: [fence + {state, status, event, esig}]  (event: number of ARGV, 0 = none)   free: [[slot, worker, execution]]   lanes: [name], in this order
--           seen, points: absent, or how many lanes the caller chose from, and the priority of each (points.lua)
--        2+ byte strings
-- REPLY  {finishes, starts, claims, dead, expired, dropped, lost, counter, more, cutoffs, orphans, lanes}
--        lanes: every lane there is, if that are not `seen`; then nothing was claimed
--        finishes, starts: [{done|stale|killed|poison, word or nil}]   claims, expired: [row]   dead: [{row, word}]
--        orphans: [{row, NODE/BOOT, once, retries, word}] (with the unknown holds: see hand_out_again)
--        cutoffs: [{table, version, field, value, field, value, ...}] that the agent does not know yet
-- RACE   pop, kill check and claim are one step: a job is in its lane or held under a fence (claim, attempt), and a kill
--        sees one or the other. A finish is written only under its fence, so a late agent cannot overwrite a newer
--        attempt and an end is written once, with its one event.

local NODE, BOOT = doc.node, doc.boot
local MEMBER = NODE .. '/' .. BOOT
local DAY_S = 86400
local FAR_S = 30 * DAY_S

-- The state of a job under a fence; nil when another attempt, another holder or an end has replaced it. `seen` keeps
-- what the mark of the same attempt found a moment ago.
local seen = {}
local function fenced(f, key)
  local found = seen[f.job] or fields(key, 'rf_claim', 'rf_attempt', 'rf_state', 'rf_seq', 'rf_sel', 'rf_then', 'rf_flow')
  if not found or found[1] ~= MEMBER .. '/' .. f.slot or whole(found[2]) ~= f.attempt or not HELD[found[3] or ''] then
    return nil
  end
  return found[3], found
end

-- The time of a claim, as its execution has it.
local function stamp(ms)
  return string.format('%d.%03d000', math.floor(ms / 1000), ms % 1000)
end

-- Our own traces of an attempt go even when the fence is gone: they carry its execution id and nobody else's. Returns
-- when the execution began, as RQ has it.
local function settle(f, fence_holds)
  local held = fields(KEYS[3], f.job)
  local known = held and held[1] and held_as(held[1])
  if known and known.attempt == f.attempt then call('HDEL', KEYS[3], f.job) else known = nil end
  local started_at
  if known and known.execution == f.execution then
    started_at = stamp(known.ms)
  elseif f.execution ~= '' then
    started_at = (fields(RQ .. 'execution:' .. f.job .. ':' .. f.execution, 'created_at') or {})[1]
  end
  if fence_holds and f.execution ~= '' then
    -- No attempt of this job but this one: the whole index goes with it.
    local both = f.job .. ':' .. f.execution
    call('DEL', RQ .. 'execution:' .. both, RQ .. 'executions:' .. f.job)
    put('ZREM', RQ .. 'wip:' .. f.lane, both)
    if f.worker ~= '' then put('SREM', RQ .. 'worker:' .. f.worker .. ':executions', both) end
  else
    drop_execution(f.job, f.execution, f.lane, f.worker)
  end
  return started_at
end

local function record_result(f, started_at)
  local entry = {'type', string.format('%d', f.type), 'worker_name', f.worker}
  local n = 4
  if f.failure > 0 then entry[n + 1], entry[n + 2], n = 'exc_string', ARGV[f.failure], n + 2 end
  if f.value > 0 then entry[n + 1], entry[n + 2], n = 'return_value', ARGV[f.value], n + 2 end
  if f.execution ~= '' then entry[n + 1], entry[n + 2], n = 'execution_id', f.execution, n + 2 end
  if started_at then entry[n + 1], entry[n + 2], n = 'execution_started_at', started_at, n + 2 end
  if f.execution ~= '' then entry[n + 1], entry[n + 2] = 'execution_ended_at', NOW_FLOAT end
  local key = RQ .. 'results:' .. f.job
  put('XADD', key, 'MAXLEN', '~', 10, '*', unpack(entry))
  call('EXPIRE', key, doc.ttl)
end

local trimmed = {}
local function register_end(f)
  local key = RQ .. f.registry .. ':' .. f.lane
  local score = f.registry == 'canceled' and NOW_S or NOW_S + doc.ttl
  put('ZADD', key, string.format('%d', score), f.job)
  -- RQ trims these only when somebody counts them, and canceled ones never.
  if trimmed[key] then return end
  trimmed[key] = true
  local over = f.registry == 'canceled' and NOW_S - doc.ttl or NOW_S
  call('ZREMRANGEBYSCORE', key, 0, string.format('%d', over))
end

local function finish_end(f, key, started_at)
  call('HSET', key, 'status', f.status, 'ended_at', NOW_ISO, 'last_heartbeat', NOW_ISO, 'rf_state', f.state,
    'rf_reason', f.reason, 'rf_outcome', f.outcome > 0 and ARGV[f.outcome] or '', 'rf_outcome_sig', f.osig)
  record_result(f, started_at)
  register_end(f)
  call('EXPIRE', key, doc.ttl)
  -- Only a job that never ran can have been taken out of its lane by a kill.
  if f.state ~= 'finished' then put('ZREM', RF .. 'doomed', f.job) end
  set_worker(f.worker, 'idle', f.state == 'finished' and 'successful_job_count' or 'failed_job_count', f.wall)
  emit(tenant_of(f.job), ARGV[f.event], f.esig)
end

local function finish_retry(f, key, started_at)
  call('HSET', key, 'enqueued_at', NOW_ISO, 'started_at', '', 'ended_at', '', 'last_heartbeat', NOW_ISO)
  record_result(f, started_at)
  set_worker(f.worker, 'idle', 'failed_job_count', f.wall)
  if f.delay > 0 then
    call('HSET', key, 'rf_waits', 'retry')
    to_scheduled(f.job, key, f.lane, NOW_MS + f.delay)
  else
    back_to_lane(f.job, key, f.lane, f.attempt)
  end
  emit(tenant_of(f.job), ARGV[f.event], f.esig)
end

-- The same end was written by an earlier call whose reply was lost.
local function written_before(f, key)
  local found = fields(key, 'rf_claim', 'rf_attempt', 'rf_state', 'rf_outcome_sig')
  return f.kind == 'end' and found and found[1] == MEMBER .. '/' .. f.slot and whole(found[2]) == f.attempt
    and found[3] == f.state and f.osig ~= '' and found[4] == f.osig
end

local function finish(f)
  local key = RQ .. 'job:' .. f.job
  local state, found = fenced(f, key)
  seen[f.job] = nil
  if not state then
    settle(f)
    set_worker(f.worker, 'idle')
    return {written_before(f, key) and 'done' or 'stale'}
  end
  if f.kind == 'release' and state ~= 'claimed' then return {'stale'} end
  -- An attempt that was lost while a kill waited for its own node was killed, and so is one that would run again.
  if f.kind == 'retry' or f.kind == 'end' and f.state == 'lost' and f.execution ~= '' then
    local order = doom(f.job, seq_of(found[4]), found[5], f.lane, NODE)
    if order then
      call('HSET', key, 'rf_state', 'killing')
      return {'killed', order}
    end
  end
  if f.kind == 'retry' and f.crash == 1 and crashes(f, key) >= MAX_CRASHES then return {'poison'} end
  let_go(f.job, found[7], f.kind == 'end')
  local started_at = settle(f, true)
  if f.kind == 'end' then
    finish_end(f, key, started_at)
    if found[6] then release_waiters(f.job, f.state) end
  elseif f.kind == 'retry' then
    finish_retry(f, key, started_at)
  else
    set_worker(f.worker, 'idle')
    back_to_lane(f.job, key, f.lane, f.execution == '' and f.attempt or f.attempt - 1)
  end
  return {'done'}
end

-- Jobs whose attempt ends within this turn.
local ended = {}
local function start(s)
  local key = RQ .. 'job:' .. s.job
  local state, found = fenced(s, key)
  if not state then return {'stale'} end
  if state == 'claimed' then
    call('HSET', key, 'rf_state', s.state, 'status', s.status, 'last_heartbeat', NOW_ISO, 'started_at', NOW_ISO,
      'worker_name', s.worker)
    call('PERSIST', key)
    begun(s.job, found[7])
    if s.event > 0 then emit(tenant_of(s.job), ARGV[s.event], s.esig) end
  else
    call('HSET', key, 'rf_state', s.state, 'status', s.status, 'last_heartbeat', NOW_ISO)
  end
  found[3] = s.state
  seen[s.job] = found
  -- An attempt that has ended by itself is too late to kill.
  if ended[s.job] then return {'done'} end
  local order = s.state == 'running' and doom(s.job, seq_of(found[4]), found[5], s.lane, NODE) or nil
  return {'done', order}
end

-- What the agent gets.
local claims, dead, expired, orphans, dropped, handed = {}, {}, {}, {}, 0, 0
local tenants = {}

local function claim(id, key, lane, offer, attempt, seq, timeout, taken)
  local slot, worker, execution = offer[1], offer[2], offer[3]
  local life = timeout + FAR_S
  local both = id .. ':' .. execution
  local record = RQ .. 'execution:' .. both
  hold(id, key, NODE, BOOT, slot, 'claimed', attempt, execution, lane)
  local now = stamp(NOW_MS)
  put('HSET', record, 'id', execution, 'job_id', id, 'created_at', now, 'last_heartbeat', now, 'worker_name', worker)
  call('EXPIRE', record, life)
  local index = RQ .. 'executions:' .. id
  put('ZADD', index, string.format('%d', NOW_S + life + 60), execution)
  call('EXPIRE', index, life + 60)
  -- Far in the future: a read-only `rq info` fails every job whose score here has lapsed.
  put('ZADD', RQ .. 'wip:' .. lane, string.format('%d', NOW_S + life), both)
  local own = RQ .. 'worker:' .. worker .. ':executions'
  put('SADD', own, both)
  call('EXPIRE', own, 480)
  set_worker(worker, 'busy')
  -- All of it is of a grammar without anything to escape: ids, and what this agent is called.
  emit(tenant_of(id), string.format(
    '{"type":"job.claimed","job":"%s","attempt":%d,"at_ms":%.0f,"node":"%s","boot":"%s","detail":{"slot":"%s"}}',
    id, attempt, NOW_MS, NODE, BOOT, slot), '')
  taken[2], taken[4], taken[5] = attempt, slot, execution
  claims[#claims + 1] = taken
end

-- What `take` reads of a job: our own fields, then those of `row` and `odd_fields` (prelude.lua).
local READ = {'rf_state', 'rf_attempt', 'rf_seq', 'rf_sel', 'rf_not_after', 'timeout', 'rf_flow', 'data', 'origin',
  unpack(ODD)}
local OWN = 8

-- Takes one popped id; true when it fills the slot.
local function take(id, lane, offer)
  local key = RQ .. 'job:' .. id
  local length = #id <= 80 and string.match(id, '^[%w_-]+$') and pcall_('HSTRLEN', key, 'data')
  local known = length and not wrong(length)
  -- A payload over the cap is not even read here.
  local oversized = known and length > doc.cap
  READ[OWN] = oversized and '' or 'data'
  local found = known and fields(key, unpack(READ))
  -- No such job, one that is held or has ended (a repeated id, attack 24), or one that waits elsewhere.
  if not found or (found[1] and found[1] ~= 'queued') or (not found[1] and call('EXISTS', key) == 0) then
    dropped = dropped + 1
    return false
  end
  local seq = seq_of(found[3])
  local attempt = whole(found[2] or '0')
  local order = doom(id, seq, found[4], lane)
  tenants[tenant_of(id)] = true
  if order then
    local buried, size = bury(id, key, NODE, BOOT, attempt or 0, lane, seq, order)
    dead[#dead + 1] = buried
    handed = handed + size
    return false
  end
  local odd = odd_among(found, OWN, lane)
  if not attempt or attempt > 1000 then
    odd[#odd + 1] = 'rf_attempt'
    attempt = 0
  end
  if length == 0 then odd[#odd + 1] = 'data' end
  handed = handed + (oversized and 0 or length)
  local taken = {id, attempt, lane, '-', '', seq, oversized and '' or found[OWN] or '', oversized and 1 or 0,
    table.concat(odd, ','), found[7] or ''}
  local not_after = whole(found[5] or nil)
  if not_after and not_after > 0 and not_after < NOW_MS then
    hold(id, key, NODE, BOOT, '-', 'claimed', attempt, '-', lane)
    expired[#expired + 1] = taken
    return false
  end
  local timeout = whole(found[6] or nil)
  if not timeout or timeout < 1 or timeout > 366 * DAY_S then timeout = 3660 end
  local limits = limits_of(id, found[7])
  if limits and not admit_start(id, key, lane, seq, attempt + 1, timeout, not_after or 0, limits) then return false end
  claim(id, key, lane, offer, attempt + 1, seq, timeout, taken)
  return true
end

-- What an earlier call handed out in a reply that never arrived. Claims for slots come from turns alone, and turns follow
-- each other; other holds may be in a reply that is still on its way to another loop of the same agent.
local REPLY_TIMEOUT_MS = 10000
local function hand_out_again(id, text, known)
  local held = held_as(text)
  if not held or known[id] then return end
  if held.mark ~= '' and held.ms + REPLY_TIMEOUT_MS > NOW_MS then return end
  local key = RQ .. 'job:' .. id
  local found = fields(key, 'rf_claim', 'rf_attempt', 'rf_state', 'rf_seq', 'rf_sel', 'rf_flow')
  call('HDEL', KEYS[3], id)
  drop_execution(id, held.execution, held.lane, '')
  if not found or string.match(found[1] or '', '^(.*)/[^/]*$') ~= MEMBER or whole(found[2]) ~= held.attempt then return end
  local seq, taken, size = seq_of(found[4]), nil, 0
  local order = doom(id, seq, found[5], held.lane)
  if found[3] == 'claimed' then
    let_go(id, found[6], false)
    back_to_lane(id, key, held.lane, held.mark == '' and held.attempt - 1 or held.attempt)
  elseif found[3] == 'killing' and held.mark == '-' then
    taken, size = bury(id, key, NODE, BOOT, held.attempt, held.lane, seq, order or {'tombstone', 0, '', ''})
    dead[#dead + 1] = taken
  elseif HELD[found[3] or ''] then
    taken, size = adopt_started(id, key, NODE, BOOT, MEMBER, found[3], held.attempt, held.lane, seq, order)
    orphans[#orphans + 1] = taken
  end
  handed = handed + size
end

local function reconcile()
  local size = doc.held and pcall_('HLEN', KEYS[3])
  if not size or wrong(size) or size <= #doc.held then return end
  local known = {}
  for _, id in ipairs(doc.held) do known[id] = true end
  local all = call('HGETALL', KEYS[3])
  for i = 1, #all, 2 do hand_out_again(all[i], all[i + 1], known) end
end

local more = 0
local function fill(next)
  local left, empty = doc.budget, false
  for _, offer in ipairs(doc.free) do
    local filled = false
    while not filled do
      local at = next(empty)
      if not at then return end
      if left <= 0 or handed >= doc.bytes then
        more = 1
        return
      end
      local id = pcall_('LPOP', KEYS[5 + at])
      empty = not id or wrong(id)
      if not empty then
        left = left - 1
        filled = take(id, doc.lanes[at], offer)
      end
    end
  end
  if next(empty) then more = 1 end
end

-- Who has filled its slots and leaves jobs behind wakes one more of those who wait (start.lua, wake).
local function call_next()
  local looked = {}
  for _, taken in ipairs(claims) do
    local lane = taken[3]
    local left = not looked[lane] and pcall_('LLEN', RQ .. 'queue:' .. lane)
    looked[lane] = true
    if left and not wrong(left) and left > 0 then wake(lane) end
  end
end

-- The tables behind the claims: the agent checks them against the selectors of the signed envelope before the start.
local function news(name)
  local key = name == '' and RF .. 'cut' or RF .. 'cut:' .. name
  local version = fields(key, '#')
  if not version or not version[1] or version[1] == doc.known[name] then return nil end
  local reply = {name, version[1]}
  for _, part in ipairs(call('HGETALL', key)) do reply[#reply + 1] = part end
  return reply
end

-- Whether the store refuses new data, asked by a write that changes nothing and before any other: then no more work is
-- taken out of the lanes, as its results would need more memory.
local function is_full()
  local reply = pcall_('ZADD', KEYS[2], 'XX', 0, '-')
  return wrong(reply) and string.find(reply.err, 'OOM', 1, true)
end

local full = #doc.free > 0 and is_full()
go_through('HDEL', KEYS[3])
local finishes, starts, cutoffs = {}, {}, {}
for _, f in ipairs(doc.finishes) do ended[f.job] = f.kind == 'end' and f.state ~= 'lost' end
-- Marks first: an attempt that ended within this turn was started all the same.
for i, s in ipairs(doc.starts) do starts[i] = start(s) end
for i, f in ipairs(doc.finishes) do finishes[i] = finish(f) end
reconcile()

local lease = tonumber(call('ZSCORE', KEYS[2], MEMBER) or nil)
local lost = (not lease or lease <= fleet_ms(KEYS[4])) and 1 or 0
-- The caller chose its lanes without knowing all of them: what came first in a new one may go before theirs.
local fresh = lost == 0 and #doc.free > 0 and doc.seen and call('SCARD', RF .. 'lanes') ~= doc.seen
if fresh then
  more = 1
elseif lost == 0 and #doc.free > 0 and not full then
  fill(doc.points and by_points(doc.lanes, doc.points, 5) or in_order())
  if #claims == #doc.free or more == 1 then call_next() end
  if #claims > 0 then
    cutoffs[1] = news('')
    for tenant in pairs(tenants) do cutoffs[#cutoffs + 1] = news(tenant) end
  end
end
write_workers()
return {finishes, starts, claims, dead, expired, dropped, lost, counter(), more, cutoffs, orphans,
  fresh and call('SMEMBERS', RF .. 'lanes') or {}}
