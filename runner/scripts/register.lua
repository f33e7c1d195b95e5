-- Takes a node's name and a lease for one agent start, and lists its slots as RQ workers.
--
-- KEYS   1 rf:leases   2 rf:clock   3 rf:nodes   4 rf:hosts   5 rq:workers   6+ rq:worker:NAME of each slot
-- ARGV   1  {rq, rf, node, boot, host, lease, margin, record, birth: {field: value}, lanes: [name]}
--           host: an id of the machine; lease, margin: milliseconds; record: NodeView as JSON
-- REPLY  {ok, member, member, ...} earlier starts of this node that still hold something | {refused, host}
-- RACE   two hosts that start under one name: the second is refused while the first one's lease (and margin) lasts. On
--        the same host the agent's own lock has settled who is alive.

local MEMBER = doc.node .. '/' .. doc.boot
local WORKER_TTL_S = 480

local now = fleet_ms(KEYS[2], true)
local older = {}
local host = call('HGET', KEYS[4], doc.node)
for _, member in ipairs(call('ZRANGE', KEYS[1], 0, -1)) do
  if string.sub(member, 1, #doc.node + 1) == doc.node .. '/' and member ~= MEMBER then
    local lapses = tonumber(call('ZSCORE', KEYS[1], member))
    if host and host ~= doc.host and lapses + doc.margin > now then return {'refused', host} end
    if host == doc.host then older[#older + 1] = member end
  end
end
call('ZADD', KEYS[1], string.format('%d', now + doc.lease), MEMBER)
call('HSET', KEYS[3], doc.node, doc.record)
call('HSET', KEYS[4], doc.node, doc.host)

for i = 6, #KEYS do
  local worker = KEYS[i]
  call('DEL', worker)
  for field, value in pairs(doc.birth) do call('HSET', worker, field, value) end
  call('HSET', worker, 'birth', NOW_ISO, 'last_heartbeat', NOW_ISO, 'queues', table.concat(doc.lanes, ','))
  call('EXPIRE', worker, WORKER_TTL_S)
  put('SADD', KEYS[5], worker)
  for _, name in ipairs(doc.lanes) do put('SADD', RQ .. 'workers:' .. name, worker) end
end
table.insert(older, 1, 'ok')
return older
