-- Who holds a job: claims, what goes with them, and giving back; stands after doom.lua.

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

-- Gives a job back: to the head of its lane, where `attempt` counts as the last one.
local function back_to_lane(id, key, lane, attempt)
  call('HSET', key, 'status', 'queued', 'rf_state', 'queued', 'rf_attempt', string.format('%d', math.max(attempt, 0)))
  call('HDEL', key, 'rf_claim')
  put('LPUSH', RQ .. 'queue:' .. lane, id)
  name_lane(lane)
  wake(lane)
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
