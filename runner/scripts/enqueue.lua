-- Enqueues a batch of jobs: all of them, or none.
--
-- KEYS   1 rf:seq   2 rf:lanes   3 rq:queues
--        then per job: rq:job:ID  rq:queue:LANE  rf:act:TENANT
-- ARGV   1  {rq, rf, ttl, jobs: [{id, lane, tenant, task, description, timeout, sel, tags, not_after, retries, once,
--             after, failed, due, flow, again}], tick: {member, due, next, token}}
--           ttl: result_ttl and failure_ttl in seconds; timeout: limit + 60 s; sel: selectors joined by "\n";
--           tags: JSON text; not_after: Unix ms; retries: a number; once: 0 or 1 (all but id, lane: hints for readers)
--           after: absent, or the ids of the jobs to wait for (earlier ones of the batch, or known); failed: refuse, run
--           due: absent, or the Unix ms before which the job must not start
--           flow: absent, or its limits (limits.lua); again: absent, or the ended job that it repeats, which it does once
--           tick: absent, or the one job is the occurrence of schedule `member` at `due`, whose next one is `next` (0 =
--           none); token: see due.lua
--        2+ per job: the payload (zlib of RQ's JSON form)
-- REPLY  the sequence number of each job; or, with nothing written, the error "DUPLICATE ID", "UNKNOWN_AFTER ID" (no such
--        job to wait for), "CROWDED_AFTER ID" (too many jobs wait for it), "TAKEN ID HOLDER" (a job that has not ended holds
--        its unique name), "REPEATED ID NEW" (job NEW repeats that one already), "CROWDED_LANES MOST" (the batch needs new
--        lanes, and the fleet has that many), or "STALE_TICK" (another scheduler was first, or leads now); but after an
--        error of its one job a schedule has moved on all the same
-- RACE   a job is visible to agents only with all its fields, its sequence number and its place in the lane; the number
--        is drawn here, so that a cutoff decides by order and not by clocks; two enqueues of one id cannot both win. What
--        a job waits for is looked at in the step that lets it wait, so no end slips by in between.

local MAX_WAIT_S = 31622400
-- What is kept for jobs that end within their usual life (kill.lua, CUTOFF_TTL_S) is kept longer while others may start.
local USUAL_LIFE_MS = 604800000 + 60000
local MAX_WAITERS = 1000
-- Every agent asks for all lanes once a second, so no client may add to them without end.
local MAX_LANES = 10000

local seen, crowd = {}, {}
-- What is wrong with the jobs that one job waits for, or nil.
local function wrong_after(job)
  for _, other in ipairs(job.after or {}) do
    if not seen[other] then
      local found = fields(RQ .. 'job:' .. other, 'rf_state')
      if not found or not found[1] then return 'UNKNOWN_AFTER ' .. other end
    end
    local waiting = crowd[other] or pcall_('SCARD', RF .. 'then:' .. other)
    crowd[other] = (wrong(waiting) and 0 or waiting) + 1
    if crowd[other] > MAX_WAITERS then return 'CROWDED_AFTER ' .. other end
  end
  return nil
end

-- Moves a schedule on, in the step that enqueues its occurrence; nil if it has moved already or others lead.
local function tick(t)
  local due = call('ZSCORE', RF .. 'ticks', t.member)
  local held = fields(RF .. 'leader', 'token')
  if not due or tonumber(due) ~= t.due or not held or whole(held[1] or nil) ~= t.token then return nil end
  if t.next > 0 then
    call('ZADD', RF .. 'ticks', string.format('%d', t.next), t.member)
  else
    call('ZREM', RF .. 'ticks', t.member)
  end
  return true
end
if doc.tick and not tick(doc.tick) then return redis.error_reply('STALE_TICK') end

local function crowded_lanes()
  local size = pcall_('SCARD', KEYS[2])
  local room = MAX_LANES - (wrong(size) and 0 or size)
  if room >= #doc.jobs then return false end
  local new, named = 0, {}
  for _, job in ipairs(doc.jobs) do
    if not named[job.lane] and call('SISMEMBER', KEYS[2], job.lane) == 0 then new = new + 1 end
    named[job.lane] = true
  end
  return new > 0 and new > room
end
if crowded_lanes() then return redis.error_reply('CROWDED_LANES ' .. MAX_LANES) end

local names, limits = {}, {}
-- What stands against a job's unique name, or its being a repetition; nil if nothing does.
local function taken(job)
  local found = limits_of(job.id, job.flow)
  limits[job.id] = found
  if found and found.unique then
    local holder = names[found.unique] or holder_of(found)
    if holder then return 'TAKEN ' .. job.id .. ' ' .. holder end
    names[found.unique] = job.id
  end
  local done = job.again and fields(RQ .. 'job:' .. job.again, 'rf_repeated')
  if done and done[1] then return 'REPEATED ' .. job.again .. ' ' .. done[1] end
  return nil
end

for i, job in ipairs(doc.jobs) do
  if seen[job.id] or call('EXISTS', KEYS[3 * i + 1]) == 1 then return redis.error_reply('DUPLICATE ' .. job.id) end
  local fault = wrong_after(job)
  fault = fault or taken(job)
  if fault then return redis.error_reply(fault) end
  seen[job.id] = true
end

-- Lets a job wait for those of its `after` that have not ended; false if it need not, or can't run any more.
local function defer(job, hash, life)
  local open = {}
  for _, other in ipairs(job.after) do
    local state = fields(RQ .. 'job:' .. other, 'rf_state')[1]
    if not ENDED[state] then
      open[#open + 1] = other
    elseif state ~= 'finished' and job.failed ~= 'run' then
      return false
    end
  end
  if #open == 0 then return false end
  life = string.format('%d', life)
  for _, other in ipairs(open) do
    local waiters = RF .. 'then:' .. other
    put('SADD', waiters, job.id)
    if call('TTL', waiters) < tonumber(life) then call('EXPIRE', waiters, life) end
    call('HSET', RQ .. 'job:' .. other, 'rf_then', '1')
  end
  put('SADD', RF .. 'open:' .. job.id, unpack(open))
  call('EXPIRE', RF .. 'open:' .. job.id, life)
  call('HSET', hash, 'status', 'deferred', 'rf_state', 'deferred', 'rf_after', job.failed, 'enqueued_at', '')
  put('ZADD', RQ .. 'deferred:' .. job.lane, string.format('%d', math.floor(job.not_after / 1000)), job.id)
  note('job.deferred', job.id, 0, {detail = {queue = job.lane, task = job.task, after = #open}})
  return true
end

-- What a batch does to each lane and each list of recent jobs, written once at its end.
local lanes, recents = {}, {}
local function of(table, key)
  table[key] = table[key] or {}
  return table[key]
end

local replies = {}
for i, job in ipairs(doc.jobs) do
  local hash, lane, recent = KEYS[3 * i + 1], of(lanes, KEYS[3 * i + 2]), of(recents, KEYS[3 * i + 3])
  -- One by one: who had the right to add any number could put the counter before every cutoff, or past all of them.
  local seq = call('INCR', KEYS[1])
  call('HSET', hash,
    'created_at', NOW_ISO, 'data', ARGV[i + 1],
    'success_callback_name', '', 'failure_callback_name', '', 'stopped_callback_name', '',
    'started_at', '', 'ended_at', '', 'last_heartbeat', '', 'worker_name', '', 'group_id', '',
    'origin', job.lane, 'description', job.description, 'enqueued_at', NOW_ISO,
    'timeout', string.format('%d', job.timeout), 'result_ttl', string.format('%d', doc.ttl),
    'failure_ttl', string.format('%d', doc.ttl), 'status', 'queued',
    'rf_state', 'queued', 'rf_attempt', '0', 'rf_seq', string.format('%d', seq), 'rf_sel', job.sel,
    'rf_tenant', job.tenant, 'rf_task', job.task, 'rf_tags', job.tags,
    'rf_not_after', string.format('%d', job.not_after), 'rf_retries', string.format('%d', job.retries),
    'rf_once', string.format('%d', job.once))
  lane.name = job.lane
  recent[#recent + 1] = string.format('%d', seq)
  recent[#recent + 1] = job.id
  -- The list of recent jobs lives as long as the longest-lived job in it may.
  local wait = math.ceil((job.not_after - NOW_MS) / 1000)
  local life = math.min(math.max(wait, 0), MAX_WAIT_S) + doc.ttl
  recent.life = math.max(recent.life or 0, life)
  if job.not_after - NOW_MS > USUAL_LIFE_MS and job.not_after > (tonumber(pcall_('GET', RF .. 'horizon') or nil) or 0) then
    call('SET', RF .. 'horizon', string.format('%d', job.not_after), 'EX', string.format('%d', life))
  end
  if job.due then call('HSET', hash, 'rf_due', string.format('%d', job.due)) end
  if limits[job.id] then
    call('HSET', hash, 'rf_flow', job.flow)
    if limits[job.id].unique then take_name(job.id, limits[job.id], job.not_after) end
  end
  if job.again and call('EXISTS', RQ .. 'job:' .. job.again) == 1 then
    call('HSET', RQ .. 'job:' .. job.again, 'rf_repeated', job.id)
  end
  if job.after and defer(job, hash, life) then
    -- Its dependencies release it; release_waiters looks at its time then.
  elseif job.due and job.due > NOW_MS then
    call('HSET', hash, 'enqueued_at', '')
    to_scheduled(job.id, hash, job.lane, job.due)
    note('job.scheduled', job.id, 0, {detail = {queue = job.lane, task = job.task, due_ms = job.due}})
  else
    lane[#lane + 1] = job.id
    note('job.queued', job.id, 0, {detail = {queue = job.lane, task = job.task}})
  end
  replies[i] = seq
end

for key, lane in pairs(lanes) do
  put('SADD', KEYS[3], key)
  put('SADD', KEYS[2], lane.name)
  if #lane > 0 then
    put('RPUSH', key, unpack(lane))
    wake(lane.name, #lane)
  end
end
for key, recent in pairs(recents) do
  put('ZADD', key, unpack(recent))
  call('ZREMRANGEBYRANK', key, 0, -10001)
  if call('TTL', key) < recent.life then call('EXPIRE', key, string.format('%d', recent.life)) end
end
return replies
