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
--        lanes, and the fleet or the tenant has that many), "NO_RULES ID" (see RULES), or "STALE_TICK" (another scheduler was
--        first, or leads now); but after an error of its one job a schedule has moved on all the same
-- RULES  what a job may wait for, hold or repeat stands in rules.lua; the client asks for `enqueue_plain`, which does without,
--        where no job of a batch has any of it
-- RACE   a job is visible to agents only with all its fields, its sequence number and its place in the lane; the number
--        is drawn here, so that a cutoff decides by order and not by clocks; two enqueues of one id cannot both win. What
--        a job waits for is looked at in the step that lets it wait, so no end slips by in between.

local MAX_WAIT_S = 31622400
-- What is kept for jobs that end within their usual life (kill.lua, CUTOFF_TTL_S) is kept longer while others may start.
local USUAL_LIFE_MS = 604800000 + 60000
-- Cut to its length now and then: some more entries cost less than a look at each enqueue.
local RECENT_CUT, RECENT_SLACK_S = 64, 60
local OWN_LANES_TTL_S = 691200
local jobs = doc.jobs

-- The new lanes of the batch, by the tenant that names each first.
local new_lanes, new_count
-- What a batch does to each lane and each list of recent jobs, written once at its end.
local lanes, recents = {}, {}
for i = 1, #jobs do
  local name, key, recent = jobs[i].lane, KEYS[3 * i + 2], KEYS[3 * i + 3]
  if not lanes[key] then
    lanes[key] = {name = name}
    if pcall_('SISMEMBER', KEYS[2], name) ~= 1 then
      local tenant = tenant_of(jobs[i].id)
      new_lanes, new_count = new_lanes or {}, (new_count or 0) + 1
      new_lanes[tenant] = new_lanes[tenant] or {}
      table.insert(new_lanes[tenant], name)
    end
  end
  recents[recent] = recents[recent] or {life = 0}
end

if doc.tick and not (rules and rules.tick(doc.tick)) then return redis.error_reply('STALE_TICK') end
if new_lanes then
  -- Every agent looks for new lanes once a second, so no client may add to them without end, and no tenant take all of them.
  local MAX_LANES, MAX_OWN_LANES = 10000, 2500

  local function size_of(key)
    local size = pcall_('SCARD', key)
    return wrong(size) and 0 or size
  end

  -- Whether a tenant has as many lanes as it may; those that were forgotten meanwhile (due.lua) do not count.
  local function has_enough(tenant, more)
    local key = RF .. 'named:' .. tenant
    if size_of(key) + more <= MAX_OWN_LANES then return false end
    for _, lane in ipairs(put('SMEMBERS', key)) do
      if pcall_('SISMEMBER', KEYS[2], lane) == 0 then call('SREM', key, lane) end
    end
    return size_of(key) + more > MAX_OWN_LANES
  end

  if size_of(KEYS[2]) + new_count > MAX_LANES then return redis.error_reply('CROWDED_LANES ' .. MAX_LANES) end
  for tenant, named in pairs(new_lanes) do
    if has_enough(tenant, #named) then return redis.error_reply('CROWDED_LANES ' .. MAX_OWN_LANES) end
  end
end

local seen = {}
for i = 1, #jobs do
  local job = jobs[i]
  if seen[job.id] or call('EXISTS', KEYS[3 * i + 1]) == 1 then return redis.error_reply('DUPLICATE ' .. job.id) end
  if rules then
    local fault = rules.fault(job, seen)
    if fault then return redis.error_reply(fault) end
  elseif job.after or job.due or job.flow or job.again then
    return redis.error_reply('NO_RULES ' .. job.id)
  end
  seen[job.id] = true
end

-- The event of a job that waits in its lane; written by hand, since a plain enqueue has no dearer step than an encoder's.
local told, detail = {}, nil
local function queued(job)
  if told.lane ~= job.lane or told.task ~= job.task then
    told = job
    detail = '{"queue":' .. cjson.encode(job.lane) .. ',"task":' .. cjson.encode(job.task) .. '}'
  end
  emit(tenant_of(job.id), string.format('{"at_ms":%d,"attempt":0,"detail":%s,"job":%s,"type":"job.queued"}', NOW_MS, detail,
    cjson.encode(job.id)), '')
end

local replies = {}
for i = 1, #jobs do
  local job, hash, lane, recent = jobs[i], KEYS[3 * i + 1], lanes[KEYS[3 * i + 2]], recents[KEYS[3 * i + 3]]
  -- One by one: who had the right to add any number could put the counter before every cutoff, or past all of them.
  local seq = call('INCR', KEYS[1])
  call('HSET', hash,
    'created_at', NOW_ISO, 'data', ARGV[i + 1],
    'origin', job.lane, 'description', job.description, 'enqueued_at', NOW_ISO,
    'timeout', job.timeout, 'result_ttl', doc.ttl, 'failure_ttl', doc.ttl, 'status', 'queued',
    'rf_state', 'queued', 'rf_attempt', '0', 'rf_seq', seq, 'rf_sel', job.sel,
    'rf_tenant', job.tenant, 'rf_task', job.task, 'rf_tags', job.tags,
    'rf_not_after', job.not_after, 'rf_retries', job.retries, 'rf_once', job.once)
  recent[#recent + 1] = seq
  recent[#recent + 1] = job.id
  -- The list of recent jobs lives as long as the longest-lived job in it may.
  local wait = math.ceil((job.not_after - NOW_MS) / 1000)
  local life = math.min(math.max(wait, 0), MAX_WAIT_S) + doc.ttl
  recent.life = math.max(recent.life, life)
  if job.not_after - NOW_MS > USUAL_LIFE_MS and job.not_after > (tonumber(pcall_('GET', RF .. 'horizon') or nil) or 0) then
    call('SET', RF .. 'horizon', string.format('%d', job.not_after), 'EX', string.format('%d', life))
  end
  if not (rules and rules.apply(job, hash, life)) then
    lane[#lane + 1] = job.id
    queued(job)
  end
  replies[i] = seq
end

for key, lane in pairs(lanes) do
  -- Who put the first of the jobs that wait in it has listed the lane for RQ's tools and woken somebody, who wakes others.
  if #lane == 0 or put('RPUSH', key, unpack(lane)) == #lane then
    put('SADD', KEYS[3], key)
    if #lane > 0 then wake(lane.name, #lane) end
  end
end
for tenant, names in pairs(new_lanes or {}) do
  local own = RF .. 'named:' .. tenant
  put('SADD', KEYS[2], unpack(names))
  put('SADD', own, unpack(names))
  call('EXPIRE', own, OWN_LANES_TTL_S)
end
for key, recent in pairs(recents) do
  put('ZADD', key, unpack(recent))
  if #recent > RECENT_CUT or recent[1] % RECENT_CUT == 0 then call('ZREMRANGEBYRANK', key, 0, -10001) end
  -- A little longer, so that not every enqueue has to prolong it.
  if call('TTL', key) < recent.life then call('EXPIRE', key, string.format('%d', recent.life + RECENT_SLACK_S)) end
end
return replies
