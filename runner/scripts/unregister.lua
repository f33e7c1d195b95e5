-- Ends one agent start: its workers are dead for RQ, its lease and its record go.
--
-- KEYS   1 rf:leases   2 rf:nodes   3 rf:claims:NODE/BOOT   4 rq:workers   5+ rq:worker:NAME of each slot
-- ARGV   1  {rq, rf, node, boot}
-- REPLY  how many jobs it still holds; if any, the lease stays and lapses, so that recovery finds them
-- RACE   the count and the removal are one step: a job claimed before it is seen, none can be claimed after it.

local MEMBER = doc.node .. '/' .. doc.boot
local held = put('HLEN', KEYS[3])
if held == 0 then
  call('ZREM', KEYS[1], MEMBER)
  local record = call('HGET', KEYS[2], doc.node)
  -- A later start of the same node has put its own record there.
  if record and string.find(record, '"boot":"' .. doc.boot .. '"', 1, true) then call('HDEL', KEYS[2], doc.node) end
end
for i = 5, #KEYS do
  local worker = KEYS[i]
  for name in string.gmatch(put('HGET', worker, 'queues') or '', '[^,]+') do
    put('SREM', RQ .. 'workers:' .. name, worker)
  end
  put('SREM', KEYS[4], worker)
  if call('EXISTS', worker) == 1 then
    call('HSET', worker, 'death', NOW_ISO)
    call('EXPIRE', worker, 60)
  end
  call('DEL', worker .. ':executions')
end
return held
