-- Writes a kill so that it cannot be lost: one job, or every job of a selector that was enqueued up to now.
--
-- KEYS   form "job":    1 rq:job:ID   2 rf:tomb:ID   3 rf:ctl:all   4 rf:doomed; and 5 rf:kids:ID   6 rf:leases
--                       7 rf:nodes   8 rf:clock: the jobs that it started die, too
--        form "cutoff": 1 rf:seq   2 rf:leases   3 rf:nodes   4 rf:clock   5 rf:ctl:all   6+ rf:cut or rf:cut:TENANT
-- ARGV   1  {rq, rf, form, command, sig, id, by, reason, job, ttl, field}
--           command, sig: the signed command's text and its signature; id: the command's id
--           form "job": job; ttl: seconds that the tombstone lives (until not_after + 1 d)
--           form "cutoff": field (Selector.field)
-- REPLY  job: {unknown} | {ended, state} | {removed} (it waited; an agent will sign killed_before_start) | {sent, node}
--             with an empty second word where there is none, the live nodes follow if it has started jobs: each of them
--             answers for those
--        cutoff: {seq, node, node, ...} the live nodes, each of which answers
-- RACE   the tombstone stands before the state is read, in one step: a claim either came before (then its node gets the
--        command) or meets the tombstone. Repeating a kill changes nothing but sends the command again. The cutoff is
--        the counter of this moment, so jobs enqueued later are not hit, whatever any clock says.

local COMMAND_TTL_MS = 3600 * 1000
local CUTOFF_TTL_S = 691200

-- Commands are trimmed by age only, never by number: a flood cannot push one out.
local function send(stream, why, job)
  put('XADD', stream, 'MINID', '~', string.format('%d', NOW_MS - 2 * COMMAND_TTL_MS), '*',
    'command', doc.command, 'sig', doc.sig, 'why', why, 'job', job)
end

local function remove(key, lane, flow)
  put('LREM', RQ .. 'queue:' .. lane, 0, doc.job)
  stop_schedule(doc.job, lane)
  stop_waiting(doc.job, lane)
  -- It will never start: who wants its name next need not wait for the signature.
  let_go(doc.job, flow, true)
  call('HSET', key, 'rf_state', 'killing', 'status', 'canceled')
  -- Should no agent ever sign its end, it goes together with its tombstone.
  call('EXPIRE', key, string.format('%d', doc.ttl))
  put('ZADD', RQ .. 'canceled:' .. lane, string.format('%d', NOW_S), doc.job)
end

local function has_kids()
  return KEYS[5] ~= nil and call('EXISTS', KEYS[5]) == 1
end

local function kill_job()
  local key = KEYS[1]
  local found = fields(key, 'rf_state', 'rf_claim', 'origin', 'rf_attempt', 'rf_flow')
  local known = found and call('EXISTS', key) == 1
  local state = known and (found[1] or 'queued') or nil
  local over = state and ENDED[state]
  -- What it started meets its tombstone (doom.lua), also if it has ended itself.
  if over and not has_kids() then return {'ended', state} end
  go_through('ZREM', KEYS[4])
  put('SET', KEYS[2], doc.sig .. ' ' .. doc.command, 'EX', string.format('%d', doc.ttl))
  if over then return {'ended', state} end
  if not known then return {'unknown'} end
  note('job.kill_requested', doc.job, whole(found[4] or '0') or 0, {detail = {command = doc.id, by = doc.by, reason = doc.reason}})
  local node = string.match(found[2] or '', '^([^/]+)/')
  if HELD[state] and node then
    send(RF .. 'ctl:' .. node, 'held', doc.job)
    return {'sent', node}
  end
  if state ~= 'killing' then remove(key, found[3] or '', found[5]) end
  -- Until an agent has signed the end, the job stays in the list that every agent sweeps.
  put('ZADD', KEYS[4], string.format('%d', NOW_MS), doc.job)
  send(KEYS[3], 'removed', doc.job)
  return {'removed'}
end

local function live_nodes(leases, nodes, clock)
  local now = fleet_ms(clock)
  local names, seen = {}, {}
  for _, member in ipairs(call('ZRANGEBYSCORE', leases, string.format('(%d', now), '+inf')) do
    local node = string.match(member, '^([^/]+)/')
    if node and not seen[node] and call('HEXISTS', nodes, node) == 1 then
      seen[node] = true
      names[#names + 1] = node
    end
  end
  return names
end

-- Cutoffs stand for as long as any job enqueued so far may start.
local function cutoff_life()
  local horizon = whole(pcall_('GET', RF .. 'horizon') or nil) or 0
  return math.max(CUTOFF_TTL_S, math.ceil((horizon - NOW_MS) / 1000) + 86400)
end

local function write_cutoff(key, field, seq)
  put('HSET', key, field, string.format('%d %s %s', seq, doc.sig, doc.command))
  local version = whole(call('HGET', key, '#') or nil) or 0
  call('HSET', key, '#', string.format('%d', version + 1))
  call('EXPIRE', key, string.format('%d', cutoff_life()))
end

local function cut()
  local seq = counter()
  go_through('HDEL', KEYS[6])
  for i = 6, #KEYS do write_cutoff(KEYS[i], doc.field, seq) end
  send(KEYS[5], 'cutoff', '')
  local reply = live_nodes(KEYS[2], KEYS[3], KEYS[4])
  table.insert(reply, 1, seq)
  return reply
end

-- The jobs below one: they carry it among their selectors, and none is enqueued any more (child.lua).
local function tell_below(reply)
  send(KEYS[3], 'cutoff', '')
  reply[2] = reply[2] or ''
  for _, node in ipairs(live_nodes(KEYS[6], KEYS[7], KEYS[8])) do reply[#reply + 1] = node end
  return reply
end

if doc.form ~= 'job' then return cut() end
local reply = kill_job()
if has_kids() then return tell_below(reply) end
return reply
