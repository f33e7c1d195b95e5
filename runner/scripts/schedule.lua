-- Changes a schedule and the moment at which it is due next, in one step.
--
-- KEYS   1 rf:schedules:TENANT   2 rf:ticks   3 rf:leader
-- ARGV   1  {rq, rf, op: put|remove|pause|resume|move, name, member, next, record, sig, due, token}
--           member: TENANT/NAME; next: its next due time in ms, 0 = none; record, sig (put): the signed schedule's text
--           and its signature; due, token (move): see tick in enqueue.lua
-- REPLY  put: new | replaced | paused (replaced, and still paused); the others: done | unknown; move: done | stale
-- RACE   a schedule stands among those that are due if and only if it is stored and not paused. A scheduler moves on the
--        due time that it saw, so it never brings back a schedule that was paused, removed or replaced meanwhile.

local function set_next()
  if doc.next > 0 then
    call('ZADD', KEYS[2], string.format('%d', doc.next), doc.member)
  else
    call('ZREM', KEYS[2], doc.member)
  end
end

local function move()
  local due = call('ZSCORE', KEYS[2], doc.member)
  local held = fields(KEYS[3], 'token')
  if not due or tonumber(due) ~= doc.due or not held or whole(held[1] or nil) ~= doc.token then return 'stale' end
  set_next()
  return 'done'
end

-- The stored form is "P SIGNATURE RECORD"; P is 1 for a paused schedule.
local function write(paused, rest)
  put('HSET', KEYS[1], doc.name, paused .. ' ' .. rest)
  if paused == '1' then call('ZREM', KEYS[2], doc.member) else set_next() end
end

if doc.op == 'move' then return move() end
local known = (fields(KEYS[1], doc.name) or {})[1]
local paused, rest = string.match(known or '', '^([01]) (.*)$')
if doc.op == 'put' then
  write(paused == '1' and '1' or '0', doc.sig .. ' ' .. doc.record)
  return not known and 'new' or paused == '1' and 'paused' or 'replaced'
end
if not known then
  call('ZREM', KEYS[2], doc.member)
  return 'unknown'
end
if doc.op == 'remove' then
  call('HDEL', KEYS[1], doc.name)
  call('ZREM', KEYS[2], doc.member)
elseif rest then
  write(doc.op == 'pause' and '1' or '0', rest)
end
return 'done'
