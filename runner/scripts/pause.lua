-- Hands a signed order to the nodes: a pause or resume of one job, or of every job of a selector that runs now; or what
-- an operator orders a node to do (drain), or all nodes (suspend a queue).
--
-- KEYS   form "job":      1 rq:job:ID
--        form "selector": 1 rf:ctl:all   2 rf:leases   3 rf:nodes   4 rf:clock
--        form "node":     the same with 1 rf:ctl:NODE
--        form "queue":    as "selector", and 5 rf:suspended
-- ARGV   1  {rq, rf, form, command, sig, job}
--           command, sig: the signed command's text and its signature      form "job": job
--           form "node": node      form "queue": queue; op: suspend or unsuspend
-- REPLY  job: {unknown} | {ended, state} | {waits, state} | {sent, node}
--        selector, queue: {node, node, ...} the live nodes, each of which answers
--        node: {unknown} | {away} (the order waits for it) | {sent}
-- RACE   nothing is remembered: a job that starts later is not paused, unlike a kill, which stays in force. The state is
--        read and the command sent in one step, so the node named in the reply is the one that holds the job then.
--        A suspended queue stands in the table before any node hears of it: one that starts meanwhile reads it there.

local COMMAND_TTL_MS = 3600 * 1000

local function send(stream, job)
  put('XADD', stream, 'MINID', '~', string.format('%d', NOW_MS - 2 * COMMAND_TTL_MS), '*',
    'command', doc.command, 'sig', doc.sig, 'why', 'pause', 'job', job)
end

if doc.form == 'job' then
  local found = fields(KEYS[1], 'rf_state', 'rf_claim')
  if not found or call('EXISTS', KEYS[1]) == 0 then return {'unknown'} end
  local state = found[1] or 'queued'
  if ENDED[state] then return {'ended', state} end
  local node = string.match(found[2] or '', '^([^/]+)/')
  if not HELD[state] or not node then return {'waits', state} end
  send(RF .. 'ctl:' .. node, doc.job)
  return {'sent', node}
end

local now = fleet_ms(KEYS[4])
local names, seen = {}, {}
for _, member in ipairs(call('ZRANGEBYSCORE', KEYS[2], string.format('(%d', now), '+inf')) do
  local node = string.match(member, '^([^/]+)/')
  if node and not seen[node] and call('HEXISTS', KEYS[3], node) == 1 then
    seen[node] = true
    names[#names + 1] = node
  end
end
if doc.form == 'node' then
  if call('HEXISTS', KEYS[3], doc.node) == 0 then return {'unknown'} end
  send(KEYS[1], '')
  return {seen[doc.node] and 'sent' or 'away'}
end
if doc.form == 'queue' then
  if doc.op == 'suspend' then
    put('HSET', KEYS[5], doc.queue, doc.sig .. ' ' .. doc.command)
  else
    put('HDEL', KEYS[5], doc.queue)
  end
end
send(KEYS[1], '')
return names
