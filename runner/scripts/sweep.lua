-- Takes waiting jobs that a kill hits, so that they end although no slot is free.
--
-- KEYS   1 rf:seq   2 rf:leases   3 rf:claims:NODE/BOOT   4 rf:clock   5 rf:doomed   6+ as in `lanes`: rq:queue:LANE,
--        rq:deferred:LANE or rq:scheduled:LANE
-- ARGV   1  {rq, rf, node, boot, cap, bytes, limit, window, lanes: [[name, from, kind]], jobs: [id],
--             serves: [name]}
--           limit: most jobs taken; window: ids looked at per lane, from index `from`
--           jobs: ids that a notice named (removed from their lane by a kill); serves: see may_sign
--           kind: "queued" for the lane itself, "deferred" or "scheduled" for RQ's registry of those that wait
-- REPLY  {[{row, word}], [next `from` per lane], lost}
-- RACE   a job is taken in the step that checks it, so two agents never get the same one, and one that lies in a lane
--        leaves it in that step.

local NODE, BOOT = doc.node, doc.boot
local dead, bytes = {}, 0

local function full()
  return #dead >= doc.limit or bytes >= doc.bytes
end

local function take(id, key, found, lane, seq, order)
  local taken, size = bury(id, key, NODE, BOOT, whole(found[2] or '0') or 0, lane, seq, order)
  dead[#dead + 1] = taken
  bytes = bytes + size
end

-- A job that kill.lua removed; it is nobody's until the first agent takes it.
local function adopt(id)
  local key = RQ .. 'job:' .. id
  local found = fields(key, 'rf_state', 'rf_attempt', 'rf_seq', 'rf_sel', 'origin', 'rf_claim')
  if not found or found[1] ~= 'killing' or ENDED[found[1]] then
    call('ZREM', KEYS[5], id)
    return
  end
  if found[6] or not may_sign(found[5] or '') then return end
  local lane, seq = found[5] or '', seq_of(found[3])
  -- The tombstone may have lapsed or been removed: killing stays the safe side.
  take(id, key, found, lane, seq, doom(id, seq, found[4], lane) or {'tombstone', 0, '', ''})
end

local function comb(index, lane, from, kind)
  local ids = pcall_(kind == 'queued' and 'LRANGE' or 'ZRANGE', KEYS[5 + index], from, from + doc.window - 1)
  if wrong(ids) or #ids == 0 then return 0 end
  local kept = 0
  for _, id in ipairs(ids) do
    if full() then return from + kept end
    local key = RQ .. 'job:' .. id
    local found = #id <= 80 and string.match(id, '^[%w_-]+$')
      and fields(key, 'rf_state', 'rf_attempt', 'rf_seq', 'rf_sel')
    local waits = found and (found[1] or 'queued') == kind and call('EXISTS', key) == 1
    local seq = waits and seq_of(found[3])
    local order = waits and doom(id, seq, found[4], lane)
    if order then
      if kind == 'queued' then call('LREM', KEYS[5 + index], 1, id) else call('ZREM', KEYS[5 + index], id) end
      if kind == 'deferred' then stop_waiting(id, lane) end
      if kind == 'scheduled' then stop_schedule(id, lane) end
      take(id, key, found, lane, seq, order)
    else
      kept = kept + 1
    end
  end
  return #ids == doc.window and from + kept or 0
end

go_through('HDEL', KEYS[3])
local lease = tonumber(call('ZSCORE', KEYS[2], NODE .. '/' .. BOOT) or nil)
if not lease or lease <= fleet_ms(KEYS[4]) then return {{}, {}, 1} end
for _, id in ipairs(doc.jobs) do
  if full() then break end
  adopt(id)
end
for _, id in ipairs(call('ZRANGE', KEYS[5], 0, doc.window - 1)) do
  if full() then break end
  adopt(id)
end
-- A job that waits for others longer than its not_after goes to its lane, where its taker ends it.
for _, lane in ipairs(doc.serves or {}) do
  local over = pcall_('ZRANGEBYSCORE', RQ .. 'deferred:' .. lane, 0, string.format('(%d', NOW_S), 'LIMIT', 0, doc.window)
  for _, id in ipairs(wrong(over) and {} or over) do
    local key = RQ .. 'job:' .. id
    local found = fields(key, 'rf_state', 'rf_task')
    if found and found[1] == 'deferred' then undefer(id, key, lane, found[2]) else stop_waiting(id, lane) end
  end
end
local nexts = {}
for index, lane in ipairs(doc.lanes) do
  nexts[index] = full() and lane[2] or comb(index, lane[1], lane[2], lane[3])
end
return {dead, nexts, 0}
