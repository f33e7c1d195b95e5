-- Adds what one node's jobs have used of a budget, and tells how it stands (node_agent/kernel/budgets.py).
--
-- KEYS   1 rf:budget:TENANT:KEY   2 rf:asks:TENANT
-- ARGV   1  {rq, rf, op, from, batch, used, ttl, key, over}
--           op charge: used = {unit: number}; from, batch: NODE/BOOT and the number of its batch   ttl: ms after the
--             last use until the budget begins anew
--           op hit: over = text of what is used up; ttl: as above. Told once for each word that was said (`era`)
-- REPLY  charge: {field, value, ...} the whole hash: unit -> used, w:COMMAND -> "SIG COMMAND", b:NODE/BOOT -> batch,
--             h:ERA -> what was used up
--        hit: {1} the first to say so, {0}
-- RACE   a batch whose answer was lost comes again, and is added once.

local key = KEYS[1]
if doc.op == 'hit' then
  local first = put('HEXISTS', key, 'h:' .. doc.era) == 0 and 1 or 0
  if first == 1 then put('HSET', key, 'h:' .. doc.era, doc.over) end
  put('ZADD', KEYS[2], string.format('%d', NOW_MS + doc.ttl), 'budget ' .. doc.key)
  local left = call('PTTL', KEYS[2])
  if left < doc.ttl then call('PEXPIRE', KEYS[2], string.format('%d', doc.ttl)) end
  call('PEXPIRE', key, string.format('%d', doc.ttl))
  return {first}
end

local known = put('HGET', key, 'b:' .. doc.from)
if (whole(known or nil) or 0) < doc.batch then
  put('HSET', key, 'b:' .. doc.from, string.format('%d', doc.batch))
  for unit, count in pairs(doc.used) do
    -- A counter that is no number any more counts as used up: what can't be told is not to be spent.
    local before = tonumber(put('HGET', key, unit) or '0')
    put('HSET', key, unit, before and before == before and string.format('%.17g', before + count) or '1e300')
  end
end
call('PEXPIRE', key, string.format('%d', doc.ttl))
return call('HGETALL', key)
