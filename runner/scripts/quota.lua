-- Takes, keeps up or gives back places in the quotas of calls (node_agent/kernel/quotas.py).
--
-- KEYS   rf:quota:TENANT:DIGEST, one for each row of `rows` (take) or each name of `held` (keep, drop)
-- ARGV   1  {rq, rf, op, rows, held, life}
--           op take: rows = [{count, period, member}]: at most `count` in any `period` ms, or at a time if it is 0
--           op keep, drop: held = [member]   life: ms for which a place at a time is kept without being kept up
-- REPLY  take: {0} taken, or {number of the row that is full, ms until it may have room}   keep, drop: {count}
-- RACE   all rows are looked at before any is taken, in one step for the whole fleet: two calls can't take the last
--        place, and a call that one row refuses uses up none of the others. A node that dies keeps its places up no more.

-- No place lapses later than this: what does was written by nobody who takes places, and would keep it for ever.
local LATEST = string.format('(%d', NOW_MS + math.max(doc.life or 0, 60000))

local function room(key, row)
  put('ZREMRANGEBYSCORE', key, LATEST, '+inf')
  if row.period > 0 then
    put('ZREMRANGEBYSCORE', key, '-inf', string.format('%d', NOW_MS - row.period))
  else
    put('ZREMRANGEBYSCORE', key, '-inf', string.format('%d', NOW_MS))
  end
  if put('ZCARD', key) < row.count then return nil end
  if call('PTTL', key) < 0 then call('PEXPIRE', key, string.format('%d', row.period + 60000)) end
  local first = put('ZRANGE', key, 0, 0, 'WITHSCORES')
  local due = tonumber(first[2] or NOW_MS) + row.period
  return math.max(1, due - NOW_MS)
end

if doc.op == 'take' then
  for at, row in ipairs(doc.rows) do
    local wait = room(KEYS[at], row)
    if wait then return {at, math.floor(wait)} end
  end
  for at, row in ipairs(doc.rows) do
    local life = row.period > 0 and row.period or doc.life
    local score = row.period > 0 and NOW_MS or NOW_MS + doc.life
    put('ZADD', KEYS[at], string.format('%d', score), row.member)
    call('PEXPIRE', KEYS[at], string.format('%d', life + 1000))
  end
  return {0}
end

local count = 0
for at, member in ipairs(doc.held) do
  if doc.op == 'drop' then
    count = count + put('ZREM', KEYS[at], member)
  elseif put('ZSCORE', KEYS[at], member) then
    put('ZADD', KEYS[at], string.format('%d', NOW_MS + doc.life), member)
    call('PEXPIRE', KEYS[at], string.format('%d', doc.life + 1000))
    count = count + 1
  end
end
return {count}
