-- Jobs that wait elsewhere than in their lane: for their time, or for others; stands after hold.lua.

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
