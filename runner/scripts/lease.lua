-- Renews the lease of one agent start and shows that its workers live.
--
-- KEYS   1 rf:leases   2 rf:clock   3 rf:nodes   4 rq:workers   5+ rq:worker:NAME of each slot
-- ARGV   1  {rq, rf, node, boot, lease, record, birth: {field: value}, lanes: [name], changed: 0|1}
--           lease: milliseconds; record: NodeView as JSON; birth: the worker hash, written where it has lapsed
--           lanes, changed: the lanes served now, and whether that is news
-- REPLY  {ok, score} | {lost}
-- RACE   a lease that recovery has touched is gone or has score 0 and never comes back: its jobs have other owners. The
--        score grows with every renewal, even while Redis TIME stands or goes back, so that watchers see that it lives.

local MEMBER = doc.node .. '/' .. doc.boot
local WORKER_TTL_S = 480

go_through('ZREM', KEYS[1])
local score = tonumber(call('ZSCORE', KEYS[1], MEMBER) or nil)
local now = fleet_ms(KEYS[2], true)
-- A lease that has lapsed but that nobody has taken over yet may be renewed: its holder still has all its jobs.
if not score or score <= 0 then return {'lost'} end
score = math.max(now + doc.lease, score + 1)
call('ZADD', KEYS[1], string.format('%d', score), MEMBER)
put('HSET', KEYS[3], doc.node, doc.record)

local function serve(worker, lanes)
  local old = call('HGET', worker, 'queues') or ''
  for name in string.gmatch(old, '[^,]+') do put('SREM', RQ .. 'workers:' .. name, worker) end
  for _, name in ipairs(lanes) do put('SADD', RQ .. 'workers:' .. name, worker) end
  call('HSET', worker, 'queues', table.concat(lanes, ','))
end

for i = 5, #KEYS do
  local worker = KEYS[i]
  if put('HLEN', worker) == 0 then
    for field, value in pairs(doc.birth) do call('HSET', worker, field, value) end
    call('HSET', worker, 'birth', NOW_ISO)
    put('SADD', KEYS[4], worker)
    serve(worker, doc.lanes)
  elseif doc.changed == 1 then
    serve(worker, doc.lanes)
  end
  call('HSET', worker, 'last_heartbeat', NOW_ISO)
  call('EXPIRE', worker, WORKER_TTL_S)
  call('EXPIRE', worker .. ':executions', WORKER_TTL_S)
end
return {'ok', score}
