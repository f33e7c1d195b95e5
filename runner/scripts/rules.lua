-- What a job may wait for, hold or repeat: for an enqueue of jobs that are not all plain. Stands before enqueue.lua, whose
-- header says what `jobs` and `tick` hold.

local MAX_WAITERS = 1000

local crowd, names, limits = {}, {}, {}
local rules = {}

-- What is wrong with the jobs that one job waits for, or nil.
local function wrong_after(job, seen)
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

-- Why a job may not be enqueued, or nil. `seen`: the jobs of the batch before it.
function rules.fault(job, seen)
  return wrong_after(job, seen) or taken(job)
end

-- Moves a schedule on, in the step that enqueues its occurrence; nil if it has moved already or others lead.
function rules.tick(t)
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

-- Writes what more a job is than a plain one; true if it does not go to its lane now. `life`: seconds that it is kept.
function rules.apply(job, hash, life)
  if job.due then call('HSET', hash, 'rf_due', job.due) end
  if limits[job.id] then
    call('HSET', hash, 'rf_flow', job.flow)
    if limits[job.id].unique then take_name(job.id, limits[job.id], job.not_after) end
  end
  if job.again and call('EXISTS', RQ .. 'job:' .. job.again) == 1 then
    call('HSET', RQ .. 'job:' .. job.again, 'rf_repeated', job.id)
  end
  -- Its dependencies release it; release_waiters looks at its time then.
  if job.after and defer(job, hash, life) then return true end
  if not job.due or job.due <= NOW_MS then return false end
  call('HSET', hash, 'enqueued_at', '')
  to_scheduled(job.id, hash, job.lane, job.due)
  note('job.scheduled', job.id, 0, {detail = {queue = job.lane, task = job.task, due_ms = job.due}})
  return true
end
