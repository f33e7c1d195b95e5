-- Stores the pieces of a job's artifact, and makes them one (node_agent/kernel/artifacts.py).
--
-- KEYS   1  rf:art:JOB
-- ARGV   1  {rq, rf, op, gen, ...}: gen names one transfer
--           op piece: number, most (bytes of the job's artifacts together), ttl; ARGV[2] the bytes
--           op finish: name, attempt, pieces, size, most, ttl; ARGV[2] "SIGNATURE EVENT" of the node
--           op drop: pieces
-- REPLY  {"ok"}, {"full", bytes used}, {"stale", attempt} or {"torn"}
-- RACE   a reader sees an artifact whole, in its old form or its new one; an older attempt that still writes can't put
--        its own in the place of a newer attempt's. What is used is counted in the step that uses it.

local ART, OVERHEAD = KEYS[1], 4096

local function piece(number)
  return doc.gen .. ':' .. string.format('%d', number)
end

local function count(change)
  -- What is gone as a whole counts for nothing, and comes not back as a mere number without an end.
  if change <= 0 and call('EXISTS', ART) == 0 then return end
  local used = math.max(0, (whole(put('HGET', ART, 'used') or '0') or 0) + change)
  put('HSET', ART, 'used', string.format('%d', used))
end

-- Removes the pieces of one transfer.
local function drop(gen, pieces)
  local freed = 0
  for number = 0, pieces - 1 do
    local name = gen .. ':' .. string.format('%d', number)
    freed = freed + call('HSTRLEN', ART, name)
    call('HDEL', ART, name)
  end
  count(-freed)
end

local used = whole(put('HGET', ART, 'used') or '0') or 0

if doc.op == 'piece' then
  if used + #ARGV[2] > doc.most then return {'full', used} end
  put('HSET', ART, piece(doc.number), ARGV[2])
  count(#ARGV[2])
elseif doc.op == 'finish' then
  local old = put('HGET', ART, 'm:' .. doc.name)
  local attempt, gen, pieces = string.match(old or '', '^(%d+) (%x+) (%d+) ')
  if attempt and tonumber(attempt) > doc.attempt then
    drop(doc.gen, doc.pieces)
    return {'stale', tonumber(attempt)}
  end
  for number = 0, doc.pieces - 1 do
    if call('HEXISTS', ART, piece(number)) == 0 then return {'torn'} end
  end
  if not old then
    if used + OVERHEAD > doc.most then
      drop(doc.gen, doc.pieces)
      return {'full', used}
    end
    count(OVERHEAD)
  end
  call('HSET', ART, 'm:' .. doc.name, string.format('%d %s %d ', doc.attempt, doc.gen, doc.pieces) .. ARGV[2])
  if gen and tonumber(pieces) <= 4096 then drop(gen, tonumber(pieces)) end
else
  drop(doc.gen, doc.pieces)
  return {'ok'}
end
call('EXPIRE', ART, doc.ttl)
return {'ok'}
