-- Lets a running job start a child: stands before enqueue.lua, with one job in `jobs`.
--
-- KEYS   after those of the one job: 7 rf:kids:PARENT
-- ARGV   1  besides: child: {parent, claim, attempt, node, ancestors, name, number, below, life}
--           claim: NODE/BOOT/SLOT of the parent's attempt; ancestors: the ids above the parent, in any order; name: what the
--           parent calls the child, or ""; number, below: see runner/wire/derived.py, the child's and the next free one
--           life: seconds that the list of numbers is kept
-- REPLY  as enqueue.lua; or, with nothing written, the error "KNOWN_CHILD N" (its child N has that name), "NUMBER N"
--        (the next free number is N: sign it, and ask again) or "ENDED" (the parent, or a job above it, is over or killed)
-- RACE   a kill of the parent, or of any job above it, writes its tombstone or cutoff in one step: the child was enqueued
--        before, and meets that tombstone (doom.lua), or it is not enqueued at all.

local c = doc.child

-- Whether a kill hits a job, or has hit it. One that is forgotten has ended long ago, and not by a kill that still stands.
local function killed(id, node)
  local found = fields(RQ .. 'job:' .. id, 'rf_state', 'rf_seq', 'rf_sel', 'origin')
  if not found then return true end
  if found[1] == 'killed' or found[1] == 'killing' then return true end
  return doom(id, found[1] and seq_of(found[2]) or counter(), found[3], found[4] or '', node) ~= nil
end

local function fault_of_child()
  local named = c.name ~= '' and pcall_('HGET', KEYS[7], 'n:' .. c.name)
  named = named and not wrong(named) and whole(named) or nil
  if named then return string.format('KNOWN_CHILD %d', named) end
  local held = fields(RQ .. 'job:' .. c.parent, 'rf_claim', 'rf_attempt', 'rf_state')
  if not held or held[1] ~= c.claim or whole(held[2]) ~= c.attempt or not HELD[held[3] or ''] then return 'ENDED' end
  if killed(c.parent, c.node) then return 'ENDED' end
  for _, id in ipairs(c.ancestors) do
    if killed(id) then return 'ENDED' end
  end
  local next = pcall_('HGET', KEYS[7], 'next')
  next = not wrong(next) and whole(next or nil) or 0
  if c.number < next then return string.format('NUMBER %d', next) end
  if call('EXISTS', KEYS[4]) == 1 then return string.format('NUMBER %d', c.below) end
  return nil
end

do
  local fault = fault_of_child()
  if fault then return redis.error_reply(fault) end
  put('HSET', KEYS[7], 'next', string.format('%d', c.below))
  if c.name ~= '' then call('HSET', KEYS[7], 'n:' .. c.name, string.format('%d', c.number)) end
  if call('TTL', KEYS[7]) < c.life then call('EXPIRE', KEYS[7], string.format('%d', c.life)) end
end
