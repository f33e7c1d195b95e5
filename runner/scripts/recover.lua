-- Takes over what agent starts held that are no more.
--
-- KEYS   1 rf:seq   2 rf:leases   3 rf:clock   4 rf:claims:NODE/BOOT of the caller   5 rq:workers
-- ARGV   1  {rq, rf, node, boot, cap, bytes, limit, margin, members: [[NODE/BOOT, score, sure]], serves: [name]}
--           score: the lease's score as the caller saw it, unchanged, for lease + margin by its own clock
--           sure: 1 = do not compare with Redis TIME (an older start on the caller's host, or seen for very long)
--           serves: see may_sign; margin: milliseconds after the lapse; limit: most jobs taken over in this call
-- REPLY  {orphans, dead, requeued, leases, lost}
--        orphans: [{row, NODE/BOOT, once, retries, word or nil}] started attempts, held by the caller now
--        dead: [{row, word}] never started and hit by a kill; leases: [member, score, ...] of everyone
-- RACE   the score is compared in the step that takes the lease: an agent that renewed just now keeps everything, and
--        one whose lease is taken can never renew or write again (claims and fences have changed). Of two recoverers
--        the second finds another score. An attempt that was never marked started goes back to the head of its lane,
--        uncounted.

local NODE, BOOT = doc.node, doc.boot
local orphans, dead, requeued, bytes, taken_jobs = {}, {}, 0, 0, 0

local function adopt(id, key, member, held, found)
  local seq, lane = seq_of(found[4]), held.lane
  local order = doom(id, seq, found[5], lane)
  local unstarted = held.mark == '' and held.attempt - 1 or held.attempt
  local taken, size = nil, 0
  local doomed = found[3] == 'killing' and held.mark == '-' or found[3] == 'claimed' and order
  if doomed and not may_sign(lane) then
    -- The next node that may sign finds it when it sweeps.
    call('HSET', key, 'rf_state', 'killing')
    call('HDEL', key, 'rf_claim')
    put('ZADD', RF .. 'doomed', string.format('%d', NOW_MS), id)
    name_lane(lane)
    return 0
  elseif doomed then
    -- Killed before its start, and its end was never signed. A lapsed tombstone changes nothing.
    taken, size = bury(id, key, NODE, BOOT, unstarted, lane, seq, order or {'tombstone', 0, '', ''})
    dead[#dead + 1] = taken
  elseif found[3] == 'claimed' then
    let_go(id, found[6], false)
    back_to_lane(id, key, lane, unstarted)
    requeued = requeued + 1
  else
    taken, size = adopt_started(id, key, NODE, BOOT, member, found[3], held.attempt, lane, seq, order)
    orphans[#orphans + 1] = taken
  end
  return size
end

local function release(id, text, member)
  local held = held_as(text)
  if not held then return end
  local key = RQ .. 'job:' .. id
  drop_execution(id, held.execution, held.lane, '')
  local found = fields(key, 'rf_claim', 'rf_attempt', 'rf_state', 'rf_seq', 'rf_sel', 'rf_flow')
  local owner = found and string.match(found[1] or '', '^(.*)/[^/]*$')
  if owner ~= member or whole(found[2]) ~= held.attempt or not HELD[found[3] or ''] then return end
  bytes = bytes + adopt(id, key, member, held, found)
end

-- RQ's tools must not show the dead start's slots as workers.
local function bury_workers(node, boot)
  local prefix = RQ .. 'worker:' .. node .. '.' .. string.sub(boot, 1, 6) .. '.'
  for _, worker in ipairs(put('SMEMBERS', KEYS[5])) do
    if string.sub(worker, 1, #prefix) == prefix then
      for name in string.gmatch(put('HGET', worker, 'queues') or '', '[^,]+') do
        put('SREM', RQ .. 'workers:' .. name, worker)
      end
      call('SREM', KEYS[5], worker)
      call('DEL', worker, worker .. ':executions')
    end
  end
end

-- True when nothing is left of it.
local function take(member)
  -- Score 0: it can never be renewed, and is found again if it holds more than one call takes over.
  call('ZADD', KEYS[2], 0, member)
  local claims = RF .. 'claims:' .. member
  local held = put('HGETALL', claims)
  for i = 1, #held, 2 do
    if taken_jobs >= doc.limit or bytes >= doc.bytes then return end
    taken_jobs = taken_jobs + 1
    call('HDEL', claims, held[i])
    release(held[i], held[i + 1], member)
  end
  call('ZREM', KEYS[2], member)
  local node, boot = string.match(member, '^([^/]+)/(.+)$')
  if node then bury_workers(node, boot) end
end

go_through('ZREM', KEYS[2])
local own = tonumber(call('ZSCORE', KEYS[2], NODE .. '/' .. BOOT) or nil)
local now = fleet_ms(KEYS[3], true)
if not own or own <= now then return {{}, {}, 0, call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'), 1} end
for _, candidate in ipairs(doc.members) do
  local member, seen, sure = candidate[1], candidate[2], candidate[3] == 1
  local score = tonumber(call('ZSCORE', KEYS[2], member) or nil)
  local unchanged = score and (score == seen or score == 0 or (sure and seen < 0))
  if unchanged and member ~= NODE .. '/' .. BOOT and (sure or score == 0 or score + doc.margin <= now) then take(member) end
end
return {orphans, dead, requeued, call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'), 0}
