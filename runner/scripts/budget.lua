-- Adds what one node's jobs have used of a budget, and tells how it stands (node_agent/kernel/budgets.py).
--
-- KEYS   1 rf:budget:TENANT:KEY   2 rf:asks:TENANT
-- ARGV   1  {rq, rf, op, from, batch, used, ttl, key, over}
--           op charge: used = {unit: number}; from, batch: NODE/BOOT and the number of its batch   ttl: ms after the
--             last use until the budget begins anew; one that lives longer already is left to
--           op hit: over = text of what is used up; ttl: as above. Told once for each word that was said (`era`)
-- REPLY  charge: {field, value, ...}: unit -> used, w:COMMAND -> "SIG COMMAND" (b:NODE/BOOT -> batch,
--             h:ERA -> what was used up are kept here); {"!", ""} it holds more than any budget does
--        hit: {1} the first to say so, {0}
-- RACE   a batch whose answer was lost comes again, and is added once.

local MOST_FIELDS, MOST_NAME, MOST_TEXT = 4000, 64, 20480
-- runner/wire/flow.py, MAX_SPAN_S: what lives longer was not made by a node.
local MOST_LIFE_MS = 366 * 86400 * 1000
local key = KEYS[1]
-- As long as the job wants it that wants it longest: who comes last must not have it begin anew for the others.
local function prolong(name)
  local left = call('PTTL', name)
  if left < doc.ttl or left > MOST_LIFE_MS then call('PEXPIRE', name, string.format('%d', doc.ttl)) end
end
if doc.op == 'hit' then
  local first = put('HEXISTS', key, 'h:' .. doc.era) == 0 and 1 or 0
  if first == 1 then put('HSET', key, 'h:' .. doc.era, doc.over) end
  put('ZADD', KEYS[2], string.format('%d', NOW_MS + doc.ttl), 'budget ' .. doc.key)
  prolong(KEYS[2])
  prolong(key)
  return {first}
end

-- Numbers of one source only grow, and it waits for each answer: any other number than the one of before is new.
local known = put('HGET', key, 'b:' .. doc.from)
if whole(known or nil) ~= doc.batch then
  local is_new = put('HSET', key, 'b:' .. doc.from, string.format('%d', doc.batch)) == 1
  if is_new and call('HLEN', key) > MOST_FIELDS / 2 then
    -- Agent starts of long ago: those that live say their number with each batch.
    for _, name in ipairs(call('HKEYS', key)) do
      if string.sub(name, 1, 2) == 'b:' and name ~= 'b:' .. doc.from then call('HDEL', key, name) end
    end
  end
  for unit, count in pairs(doc.used) do
    -- A counter that is no number any more counts as used up: what can't be told is not to be spent.
    local before = tonumber(put('HGET', key, unit) or '0')
    put('HSET', key, unit, before and before == before and string.format('%.17g', before + count) or '1e300')
  end
end
prolong(key)
-- Whoever can write here can make it as large as he likes: it is not for a node to read all that.
if call('HLEN', key) > MOST_FIELDS then return {'!', ''} end
local found = {}
for _, name in ipairs(call('HKEYS', key)) do
  local form = string.sub(name, 1, 2)
  if form ~= 'b:' and form ~= 'h:' and #name <= MOST_NAME and call('HSTRLEN', key, name) <= MOST_TEXT then
    found[#found + 1] = name
    found[#found + 1] = call('HGET', key, name)
  end
end
return found
