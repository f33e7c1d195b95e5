-- Parks a call until a person has decided, and uses the decision up (node_agent/kernel/approvals.py).
--
-- KEYS   1 rf:ask:JOB   2 rf:asks:TENANT
-- ARGV   1  {rq, rf, op, base, text, timeout, keep, most, job, era}
--           op park: base: what is asked, as a digest; text: JSON of what and why; timeout: ms that a person has;
--             keep: ms for which the answer is kept   most: questions of one job
--           op use: base, era
-- REPLY  park: {era, text, word or "", expires_ms, now_ms, new (1 or 0)} | {-1} too many questions of this job
--        use: {1} the caller may act on the answer, {0} another one has
-- RACE   the same call asked again finds its first question, on any node and after any restart; a yes is good for one
--        call, so the next one is a new question (its era).

local key, era_field = KEYS[1], 'n:' .. doc.base
local life = doc.timeout and doc.timeout + doc.keep
local function prolong(name)
  if call('PTTL', name) < life then call('PEXPIRE', name, string.format('%d', life)) end
end

if doc.op == 'use' then
  local id = doc.base .. '.' .. string.format('%d', doc.era)
  local first = put('HEXISTS', key, 'u:' .. id) == 0 and 1 or 0
  if first == 1 then put('HSET', key, 'u:' .. id, '1', era_field, string.format('%d', doc.era + 1)) end
  put('ZREM', KEYS[2], doc.job .. ' ' .. id)
  return {first}
end

local era = whole(put('HGET', key, era_field) or nil) or 0
local id = doc.base .. '.' .. string.format('%d', era)
local found = put('HMGET', key, 'a:' .. id, 'w:' .. id, 'e:' .. id)
local expires = whole(found[3] or nil)
if found[1] and expires then return {era, found[1], found[2] or '', expires, NOW_MS, 0} end
local count = whole(put('HGET', key, '#') or nil) or 0
if count >= doc.most then return {-1} end
expires = NOW_MS + doc.timeout
put('HSET', key, 'a:' .. id, doc.text, 'e:' .. id, string.format('%d', expires), '#', string.format('%d', count + 1))
prolong(key)
put('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', NOW_MS))
put('ZADD', KEYS[2], string.format('%d', expires), doc.job .. ' ' .. id)
put('ZREMRANGEBYRANK', KEYS[2], 0, -10001)
prolong(KEYS[2])
return {era, doc.text, '', expires, NOW_MS, 1}
