-- What every script shares. ARGV[1] is one JSON document; doc.rq and doc.rf are the two key prefixes.
-- A key of one job, tenant or worker may hold a wrong type, or be a stream that has no ids left (whoever writes the store
-- can do that): such a key is replaced, never allowed to abort a script half-way, because an abort after a pop would lose
-- the popped job.

local doc = cjson.decode(ARGV[1])
local RQ, RF = doc.rq, doc.rf
local call, pcall_ = redis.call, redis.pcall
local ENDED = {finished = 1, failed = 1, killed = 1, refused = 1, expired = 1, lost = 1}
local HELD = {claimed = 1, running = 1, paused = 1, killing = 1}
local EVENT_TTL_S, EVENT_MAX = 2592000, 100000
local MAX_ORIGIN_SELECTORS = 200

local time = call('TIME')
local NOW_S, NOW_US = tonumber(time[1]), tonumber(time[2])
local NOW_MS = NOW_S * 1000 + math.floor(NOW_US / 1000)
local NOW_FLOAT = string.format('%d.%06d', NOW_S, NOW_US)

-- The form in which RQ writes times. Source: the proleptic Gregorian calendar, eras of 146,097 days.
local function iso(s, us)
  local days = math.floor(s / 86400)
  local rest = s - days * 86400
  local shifted = days + 719468
  local era = math.floor(shifted / 146097)
  local day = shifted - era * 146097
  local year = math.floor((day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  local rank = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * rank + 2) / 153)
  local date = rank - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ', year, month, date,
    math.floor(rest / 3600), math.floor(rest / 60) % 60, rest % 60, us)
end
local NOW_ISO = iso(NOW_S, NOW_US)

local function wrong(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

-- Source: the server's own words for a key of another type, and for a stream whose last id is the largest there is.
local function unfit(err)
  return string.find(err, 'WRONGTYPE', 1, true) or string.find(err, 'last possible ID', 1, true)
    or string.find(err, 'equal or smaller than the target stream', 1, true)
end

-- Reads or writes a key that is not everybody's; one that is unfit is replaced.
local function put(command, key, ...)
  local reply = pcall_(command, key, ...)
  if wrong(reply) then
    if not unfit(reply.err) then error(reply.err) end
    call('DEL', key)
    reply = call(command, key, ...)
  end
  return reply
end

-- Reads fields of a hash; nil when the key is no hash.
local function fields(key, ...)
  local reply = pcall_('HMGET', key, ...)
  if wrong(reply) then return nil end
  return reply
end

local function whole(text)
  local number = tonumber(text)
  if number and number >= 0 and number <= 9007199254740991 and math.floor(number) == number then return number end
  return nil
end

-- Redis TIME that never goes backwards, so that a lease once lapsed stays lapsed. Only lease scripts move it on.
local function fleet_ms(key, advance)
  local known = whole(pcall_('GET', key) or nil)
  if known and known >= NOW_MS then return known end
  if advance then call('SET', key, string.format('%d', NOW_MS)) end
  return NOW_MS
end

local function tenant_of(id)
  local tenant = string.match(id, '^([a-z0-9]+)%-')
  return tenant and #tenant <= 32 and tenant or 'main'
end

local function queue_of(lane)
  return string.match(lane, '^[^@]*')
end

-- One entry of a tenant's events. Entries of agents are signed; those of scripts have an empty signature.
local prolonged = {}
local function emit(tenant, body, signature)
  local key = RF .. 'ev:' .. tenant
  put('XADD', key, 'MAXLEN', '~', EVENT_MAX, '*', 'event', body, 'sig', signature)
  if not prolonged[key] then
    call('EXPIRE', key, EVENT_TTL_S)
    prolonged[key] = true
  end
end

local function note(kind, id, attempt, more)
  local event = more or {}
  event.type, event.job, event.attempt, event.at_ms = kind, id, attempt, NOW_MS
  emit(tenant_of(id), cjson.encode(event), '')
end

local WAKE_MAX = 64
local ONES = {}
local function wake(lane, count)
  local key = RF .. 'wake:' .. lane
  count = math.min(count or 1, WAKE_MAX)
  for i = #ONES + 1, count do ONES[i] = '1' end
  local length = put('LPUSH', key, unpack(ONES, 1, count))
  if length > WAKE_MAX then call('LTRIM', key, 0, WAKE_MAX - 1) end
  -- Who looks for work looks every second anyway: what is left of an older list may go with its time.
  if length <= count then call('EXPIRE', key, 60) end
end

-- A stored kill is "SIGNATURE COMMAND", in a cutoff table with "SEQ " before it.
local function word(kind, seq, text)
  local signature, command = string.match(text, '^(%S+) (.*)$')
  return {kind, seq, command or '', command and signature or ''}
end

local counter_known
local function counter()
  counter_known = counter_known or whole(pcall_('GET', RF .. 'seq') or nil) or 0
  return counter_known
end

-- A sequence number that is missing, forged or from the future counts as 0: every cutoff hits it (attack 22).
local function seq_of(text)
  local seq = whole(text or nil)
  return seq and seq <= counter() and seq or 0
end

local table_sizes = {}
local function is_empty(key)
  if table_sizes[key] == nil then
    local size = pcall_('HLEN', key)
    table_sizes[key] = wrong(size) and 0 or size
  end
  return table_sizes[key] == 0
end

local function cutoff(key, seq, names)
  if is_empty(key) then return nil end
  local found = call('HMGET', key, unpack(names))
  for _, text in ipairs(found) do
    local limit, rest = string.match(text or '', '^(%d+) (.*)$')
    limit = whole(limit)
    -- A cutoff above the counter is void, or one forged field would kill every future job (attack 23).
    if limit and limit <= counter() and seq <= limit then return word('cutoff', limit, rest) end
  end
  return nil
end

-- The kill that hits a job, or nil: its tombstone (signed or not), or a cutoff of the controllers or of its tenant.
-- `sel` is a hint of the hash; node is given where the job is about to leave a node, not where it arrives at one.
local function doom(id, seq, sel, lane, node)
  local tomb = pcall_('GET', RF .. 'tomb:' .. id)
  if wrong(tomb) then return {'tombstone', 0, '', ''} end
  if tomb then return word('tombstone', 0, tomb) end
  local tenant = tenant_of(id)
  local own = RF .. 'cut:' .. tenant
  if is_empty(RF .. 'cut') and is_empty(own) then return nil end
  local names = {'all', 'tenant:' .. tenant, 'queue:' .. queue_of(lane)}
  if node then names[#names + 1] = 'node:' .. node end
  for name in string.gmatch(sel or '', '[^\n]+') do
    if #names >= MAX_ORIGIN_SELECTORS then break end
    names[#names + 1] = name
  end
  return cutoff(RF .. 'cut', seq, names) or cutoff(own, seq, names)
end

-- Whether the caller may sign the end of a job that waits in a lane: readers take no other node's word (attack 3). A
-- caller that sends no `serves` may for all.
local served
local function may_sign(lane)
  if not doc.serves then return true end
  if not served then
    served = {}
    for _, name in ipairs(doc.serves) do served[name] = true end
  end
  return served[lane] == true
end

-- RQ's record of an attempt goes, whoever held it.
local function drop_execution(id, execution, lane, worker)
  if execution == '' then return end
  local both = id .. ':' .. execution
  call('DEL', RQ .. 'execution:' .. both)
  put('ZREM', RQ .. 'wip:' .. lane, both)
  put('ZREM', RQ .. 'executions:' .. id, execution)
  if worker ~= '' then put('SREM', RQ .. 'worker:' .. worker .. ':executions', both) end
end

-- What a job of ours never carries; a job that does is handed out with the names, to be refused (rq's own readers
-- would import, load or call them).
local ODD = {'meta', 'webhooks', 'success_callback_name', 'failure_callback_name', 'stopped_callback_name',
  'dependency_id', 'dependency_ids', 'retries_left', 'retry_intervals', 'repeats_left', 'repeat_intervals',
  'number_of_retries', 'rate_limit_key', 'rate_limit_concurrency', 'result', 'exc_info', 'ttl', 'group_id'}

-- A job as its taker gets it: {id, attempt, lane, slot, execution, seq, data, oversized, odd, flow}.
local function row(id, key, attempt, lane, slot, execution, seq, odd)
  local size = call('HSTRLEN', key, 'data')
  local oversized = size > doc.cap and 1 or 0
  if size == 0 then odd[#odd + 1] = 'data' end
  local data = oversized == 1 and '' or (call('HGET', key, 'data') or '')
  local flow = call('HGET', key, 'rf_flow') or ''
  return {id, attempt, lane, slot, execution, seq, data, oversized, table.concat(odd, ','), flow}, #data
end

-- The names of those among `values`, which after the first `skip` holds origin and the fields of ODD.
local function odd_among(values, skip, lane)
  local odd = {}
  if (values[skip + 1] or '') ~= lane then odd[1] = 'origin' end
  for i, name in ipairs(ODD) do
    local value = values[skip + 1 + i]
    if value and value ~= '' then odd[#odd + 1] = name end
  end
  return odd
end

local function odd_fields(key, lane)
  return odd_among(call('HMGET', key, 'origin', unpack(ODD)), 0, lane)
end

-- The claim of one agent start. `hand` is the slot's number, or what holds a job without a slot. The entry in the list
-- of claims ("ATTEMPT EXECUTION MS HAND LANE") tells recovery what the hash might lie about; for an attempt without an
-- execution it says "-" (not started) or "!" (started by somebody who is no more).
local function hold(id, key, node, boot, hand, state, attempt, execution, lane)
  call('HSET', key, 'rf_state', state, 'rf_claim', node .. '/' .. boot .. '/' .. hand,
    'rf_attempt', string.format('%d', attempt))
  put('HSET', RF .. 'claims:' .. node .. '/' .. boot, id,
    string.format('%d %s %d %s %s', attempt, execution, NOW_MS, hand, lane))
end

-- Takes the entry of `hold` apart: {attempt, execution, mark ("-", "!" or ""), ms, lane}; nil for a forged one.
local function held_as(text)
  local attempt, execution, ms, lane = string.match(text, '^(%d+) (%S+) (%d+) %S+ (.*)$')
  if not attempt then return nil end
  local mark = (execution == '-' or execution == '!') and execution or ''
  return {attempt = whole(attempt) or 0, execution = mark == '' and execution or '', mark = mark,
    ms = whole(ms) or 0, lane = lane}
end

-- A lane that was empty for long may have been forgotten (due.lua): who puts a job into one names it again.
local function name_lane(lane)
  put('SADD', RF .. 'lanes', lane)
end

-- Gives a job back: to the head of its lane, where `attempt` counts as the last one.
local function back_to_lane(id, key, lane, attempt)
  call('HSET', key, 'status', 'queued', 'rf_state', 'queued', 'rf_attempt', string.format('%d', math.max(attempt, 0)))
  call('HDEL', key, 'rf_claim')
  put('LPUSH', RQ .. 'queue:' .. lane, id)
  name_lane(lane)
  wake(lane)
end

-- Every mover of due jobs looks this often, so only what is due sooner has to wake one (due.lua). "-due" is no lane.
local DUE_LOOK_MS = 1500
-- Puts a job that nobody holds aside until `due_ms` of Redis TIME; due.lua moves it to the tail of its lane then. RQ's
-- registry shows it by the second; rf:due orders the jobs of all lanes by the millisecond.
local function to_scheduled(id, key, lane, due_ms)
  local due = string.format('%d', due_ms)
  call('HSET', key, 'status', 'scheduled', 'rf_state', 'scheduled', 'rf_due', due)
  call('HDEL', key, 'rf_claim')
  put('ZADD', RQ .. 'scheduled:' .. lane, string.format('%d', math.floor(due_ms / 1000)), id)
  put('ZADD', RF .. 'due', due, id)
  name_lane(lane)
  if due_ms - NOW_MS < DUE_LOOK_MS then wake('-due') end
end

-- A scheduled job that is to go another way.
local function stop_schedule(id, lane)
  put('ZREM', RQ .. 'scheduled:' .. lane, id)
  put('ZREM', RF .. 'due', id)
end

-- Jobs that wait for others: rf:open:ID holds what ID still waits for, rf:then:ID the jobs that wait for ID. RQ's own
-- registry shows who waits; its score is the second of their not_after, when they stop waiting.
local function stop_waiting(id, lane)
  put('ZREM', RQ .. 'deferred:' .. lane, id)
  call('DEL', RF .. 'open:' .. id)
end

-- A job that waits no longer goes to the end of its lane. Its taker decides what the ends of the others mean for it.
local function undefer(id, key, lane, task)
  stop_waiting(id, lane)
  local due = whole((fields(key, 'rf_due') or {})[1] or nil)
  if due and due > NOW_MS then
    to_scheduled(id, key, lane, due)
    note('job.scheduled', id, 0, {detail = {queue = lane, task = task or '', due_ms = due}})
    return
  end
  call('HSET', key, 'status', 'queued', 'rf_state', 'queued', 'enqueued_at', NOW_ISO)
  put('RPUSH', RQ .. 'queue:' .. lane, id)
  name_lane(lane)
  note('job.queued', id, 0, {detail = {queue = lane, task = task or ''}})
  wake(lane)
end

-- A job has ended: who waited for it and now for nothing more, or can't run any more, goes on.
local function release_waiters(id, state)
  local waiters = pcall_('SMEMBERS', RF .. 'then:' .. id)
  call('DEL', RF .. 'then:' .. id)
  if wrong(waiters) then return end
  for _, waiter in ipairs(waiters) do
    local key, open = RQ .. 'job:' .. waiter, RF .. 'open:' .. waiter
    local found = fields(key, 'rf_state', 'origin', 'rf_after', 'rf_task')
    if found and found[1] == 'deferred' then
      pcall_('SREM', open, id)
      local left = pcall_('SCARD', open)
      if wrong(left) or left == 0 or (state ~= 'finished' and found[3] ~= 'run') then
        undefer(waiter, key, found[2] or '', found[4])
      end
    end
  end
end

-- A waiting job that a kill hits: held without a slot until its taker has signed its end.
local function bury(id, key, node, boot, attempt, lane, seq, order)
  hold(id, key, node, boot, '-', 'killing', attempt, '-', lane)
  local taken, size = row(id, key, attempt, lane, '-', '', seq, odd_fields(key, lane))
  return {taken, order}, size
end

-- A started attempt whose owner is no more: held without a slot until its taker has decided on its next attempt.
local function adopt_started(id, key, node, boot, from, state, attempt, lane, seq, order)
  hold(id, key, node, boot, '-', state, attempt, '!', lane)
  local job, size = row(id, key, attempt, lane, '-', '', seq, odd_fields(key, lane))
  local hints = call('HMGET', key, 'rf_once', 'rf_retries')
  return {job, from, hints[1] == '1' and 1 or 0, whole(hints[2] or nil) or 0, order}, size
end
