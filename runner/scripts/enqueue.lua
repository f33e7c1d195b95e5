-- Enqueues a batch of jobs: all of them, or none.
--
-- KEYS   1 rf:seq   2 rf:lanes   3 rq:queues
--        then per job: rq:job:ID  rq:queue:LANE  rf:act:TENANT
-- ARGV   1  {rq, rf, ttl, jobs: [{id, lane, tenant, task, description, timeout, sel, tags, not_after, retries, once}]}
--           ttl: result_ttl and failure_ttl in seconds; timeout: limit + 60 s; sel: selectors joined by "\n";
--           tags: JSON text; not_after: Unix ms; retries: a number; once: 0 or 1 (all but id, lane: hints for readers)
--        2+ per job: the payload (zlib of RQ's JSON form)
-- REPLY  the sequence number of each job; or the error "DUPLICATE ID", with nothing written
-- RACE   a job is visible to agents only with all its fields, its sequence number and its place in the lane; the number
--        is drawn here, so that a cutoff decides by order and not by clocks; two enqueues of one id cannot both win.

local MAX_WAIT_S = 31622400

local seen = {}
for i, job in ipairs(doc.jobs) do
  if seen[job.id] or call('EXISTS', KEYS[3 * i + 1]) == 1 then return redis.error_reply('DUPLICATE ' .. job.id) end
  seen[job.id] = true
end

local replies = {}
for i, job in ipairs(doc.jobs) do
  local hash, lane, recent = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
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
  put('RPUSH', lane, job.id)
  call('SADD', KEYS[3], lane)
  call('SADD', KEYS[2], job.lane)
  put('ZADD', recent, string.format('%d', seq), job.id)
  call('ZREMRANGEBYRANK', recent, 0, -10001)
  -- The list of recent jobs lives as long as the longest-lived job in it may.
  local wait = math.ceil((job.not_after - NOW_MS) / 1000)
  local life = math.min(math.max(wait, 0), MAX_WAIT_S) + doc.ttl
  if call('TTL', recent) < life then call('EXPIRE', recent, string.format('%d', life)) end
  note('job.queued', job.id, 0, {detail = {queue = job.lane, task = job.task}})
  wake(job.lane)
  replies[i] = seq
end
return replies
