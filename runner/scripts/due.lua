-- Moves jobs whose time has come to their lanes, and says who of the callers keeps the time now.
--
-- KEYS   1 rf:due   2 rf:ticks   3 rf:leader
-- ARGV   1  {rq, rf, ttl, member, lease, limit, ticks, keep, idle}
--           member: NODE/BOOT of the caller, or another name that no other caller has; lease: milliseconds that the
--           leadership lasts, 0 = give it up; limit: most jobs moved in this call; ticks: most schedules told
--           keep: so many lanes are never forgotten; idle: seconds without an end after which an empty one may be
-- REPLY  {moved, more, wait, leads, token, now, [TENANT/NAME, due, ...], leader}
--        more: 1 = there is more to move now; wait: ms until the next job or schedule is due, -1 = none
--        leads: 1 = the caller is the leader, under `token`; now: Redis TIME in ms; then for the leader the schedules
--        that are due, with the score that a tick has to find unchanged (tick in enqueue.lua); leader: its name or ""
-- RACE   a job is in rf:due and its lane's registry, or in its lane: the move is one step, so of two callers one moves
--        it. A leadership that lapsed never comes back: its successor has another token, and a tick names the token. A
--        lane is forgotten in the step that finds it empty; whoever puts a job into a lane names it in that step.

local LEAVES = doc.lease <= 0
-- No leadership is longer: one that seems to be was taken before Redis TIME went back, and counts as lapsed.
local LONGEST_MS = 60000
-- TENANT/NAME, as runner/wire/ids.py has them.
local MAX_MEMBER = 97

local function move(id)
  call('ZREM', KEYS[1], id)
  local key = RQ .. 'job:' .. id
  local found = #id <= 80 and string.match(id, '^[%w_-]+$') and fields(key, 'rf_state', 'origin', 'rf_task', 'rf_attempt')
  if not found or found[1] ~= 'scheduled' then return 0 end
  local lane = found[2] or ''
  put('ZREM', RQ .. 'scheduled:' .. lane, id)
  call('HSET', key, 'status', 'queued', 'rf_state', 'queued', 'enqueued_at', NOW_ISO)
  put('RPUSH', RQ .. 'queue:' .. lane, id)
  name_lane(lane)
  note('job.queued', id, whole(found[4] or '0') or 0, {detail = {queue = lane, task = found[3] or ''}})
  wake(lane)
  return 1
end

-- Who keeps the time: {leads, token, leader}.
local function lead()
  local held = fields(KEYS[3], 'member', 'until', 'token')
  if not held then
    call('DEL', KEYS[3])
    held = {}
  end
  local token = whole(held[3] or nil) or 0
  local lapses = whole(held[2] or nil) or 0
  local lapsed = lapses <= NOW_MS or lapses > NOW_MS + LONGEST_MS
  if held[1] == doc.member then
    if LEAVES then
      call('HSET', KEYS[3], 'until', '0')
      return 0, token, ''
    end
  elseif LEAVES or not lapsed then
    return 0, token, lapsed and '' or held[1]
  end
  -- A leadership that lapsed is a new one, also for the same member: it does not know what others did meanwhile.
  if held[1] ~= doc.member or lapsed then token = token + 1 end
  call('HSET', KEYS[3], 'member', doc.member, 'until', string.format('%d', NOW_MS + math.min(doc.lease, LONGEST_MS)),
    'token', string.format('%d', token))
  return 1, token, doc.member
end

local moved, more = 0, 0
local now = string.format('%d', NOW_MS)
local ids = call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, doc.limit)
for _, id in ipairs(ids) do moved = moved + move(id) end
if #ids == doc.limit then more = 1 end
local leads, token, leader = lead()

-- The schedules that are due. A tick of no schedule is dropped, and a time that none can have is made one: either would
-- come again with every look and keep others from theirs.
local function due_ticks()
  local found = call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'WITHSCORES', 'LIMIT', 0, doc.ticks)
  local told = {}
  for i = 1, #found, 2 do
    local member, score = found[i], found[i + 1]
    if #member > MAX_MEMBER or not string.match(member, '^[a-z0-9]+/[%w_.-]+$') then
      call('ZREM', KEYS[2], member)
    else
      if not whole(score) then
        score = string.format('%d', math.max(0, math.floor(tonumber(score) or 0)))
        call('ZADD', KEYS[2], score, member)
      end
      told[#told + 1], told[#told + 2] = member, score
    end
  end
  return told
end
local ticks = leads == 1 and due_ticks() or {}

-- Lanes that nobody uses any more are forgotten, some each second by the leader: every agent asks for all of them. What
-- can't be read keeps its lane.
local LANES_A_LOOK, LANES_EVERY_MS, MAX_DOOMED = 100, 1000, 512

local function in_use(lane)
  for _, kind in ipairs({'queue', 'wip', 'scheduled', 'deferred'}) do
    local size = pcall_(kind == 'queue' and 'LLEN' or 'ZCARD', RQ .. kind .. ':' .. lane)
    if wrong(size) or size > 0 then return true end
  end
  -- The newest end, as turn.lua and kill.lua register it, tells when the lane was used last.
  for kind, ahead in pairs({finished = doc.ttl, failed = doc.ttl, canceled = 0}) do
    local newest = pcall_('ZREVRANGE', RQ .. kind .. ':' .. lane, 0, 0, 'WITHSCORES')
    if wrong(newest) or newest[2] and tonumber(newest[2]) - ahead > NOW_S - doc.idle then return true end
  end
  return false
end

-- The lanes of killed jobs that nobody has signed yet: only who serves the lane may (sweep.lua). nil: not all are known.
local function doomed_lanes()
  local ids = pcall_('ZRANGE', RF .. 'doomed', 0, MAX_DOOMED)
  if wrong(ids) or #ids > MAX_DOOMED then return nil end
  local lanes = {}
  for _, id in ipairs(ids) do
    local found = fields(RQ .. 'job:' .. id, 'origin')
    if not found then return nil end
    lanes[found[1] or ''] = true
  end
  return lanes
end

local function forget_lanes()
  local size = pcall_('SCARD', RF .. 'lanes')
  local over = wrong(size) and 0 or size - doc.keep
  if over <= 0 then return end
  local last = whole(call('HGET', KEYS[3], 'lanes') or nil) or 0
  if last <= NOW_MS and last > NOW_MS - LANES_EVERY_MS then return end
  call('HSET', KEYS[3], 'lanes', string.format('%d', NOW_MS))
  local doomed = doomed_lanes()
  if not doomed then return end
  for _, lane in ipairs(call('SRANDMEMBER', RF .. 'lanes', LANES_A_LOOK)) do
    if over > 0 and not doomed[lane] and not in_use(lane) then
      pcall_('SREM', RF .. 'lanes', lane)
      over = over - 1
    end
  end
end
if leads == 1 and doc.keep then forget_lanes() end

local wait = -1
local function consider(key)
  local found = call('ZRANGEBYSCORE', key, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if found[2] and (wait < 0 or tonumber(found[2]) - NOW_MS < wait) then wait = tonumber(found[2]) - NOW_MS end
end
consider(KEYS[1])
consider(KEYS[2])
return {moved, more, math.ceil(math.min(wait, 9007199254740991)), leads, token, NOW_MS, ticks, leader}
