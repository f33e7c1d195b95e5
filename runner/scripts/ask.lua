-- Parks a call until a person has decided, and uses the decision up (node_agent/kernel/approvals.py).
--
-- KEYS   1 rf:ask:JOB   2 rf:asks:TENANT   3 rf:due (words, wake)
-- ARGV   1  {rq, rf, op, base, text, timeout, keep, most, job, era}
--           op park: base: what is asked, as a digest; text: JSON of what and why, sig: the node's signature over it; timeout: ms that a person has;
--             keep: ms for which the answer is kept   most: questions of one job
--           op use: base, era   op words   op wake: job
-- REPLY  park: {era, text, word or "", expires_ms, now_ms, new (1 or 0)} | {-1} too many questions of this job
--        use: {1} the caller may act on the answer, {0} another one has
--        words: {id, text, word or "", ...} every question of the job   wake: {1} the job is due now, {0}
-- RACE   the same call asked again finds its first question, on any node and after any restart; a yes is good for one
--        call, so the next one is a new question (its era).

local key, era_field = KEYS[1], 'n:' .. (doc.base or '')
local KEEP_MS, MOST_QUESTIONS, MOST_ID, MOST_TEXT = '604800000', 256, 64, 20480
-- What no node has written is not for a node to read.
local function sent(text)
  return text and #text <= MOST_TEXT and text or ''
end
local life = doc.timeout and doc.timeout + doc.keep
local function prolong(name)
  if call('PTTL', name) < life then call('PEXPIRE', name, string.format('%d', life)) end
end

if doc.op == 'words' then
  local all, reply = put('HGETALL', key), {}
  local found = {}
  for i = 1, #all, 2 do found[all[i]] = all[i + 1] end
  for name, text in pairs(found) do
    local id = string.match(name, '^a:(.+)$')
    if id and #reply < 3 * MOST_QUESTIONS and #id <= MOST_ID then
      reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = id, sent(text), sent(found['w:' .. id])
    end
  end
  return reply
end

-- A job that was put aside until a decision is due at once when there is one.
if doc.op == 'wake' then
  local decided = false
  local all = put('HGETALL', key)
  local words, used = {}, {}
  for i = 1, #all, 2 do
    local id = string.match(all[i], '^w:(.+)$')
    if id then words[id] = true end
    id = string.match(all[i], '^u:(.+)$')
    if id then used[id] = true end
  end
  for id in pairs(words) do decided = decided or not used[id] end
  if not decided or not call('ZSCORE', KEYS[3], doc.job) then return {0} end
  call('ZADD', KEYS[3], string.format('%d', NOW_MS), doc.job)
  return {1}
end

if doc.op == 'use' then
  local id = doc.base .. '.' .. string.format('%d', doc.era)
  local first = put('HEXISTS', key, 'u:' .. id) == 0 and 1 or 0
  if first == 1 then put('HSET', key, 'u:' .. id, '1', era_field, string.format('%d', doc.era + 1)) end
  -- It was lost meanwhile: what stands there now is kept no longer than another one would be.
  if call('PTTL', key) < 0 then call('PEXPIRE', key, KEEP_MS) end
  put('ZREM', KEYS[2], doc.job .. ' ' .. id)
  return {first}
end

local era = whole(put('HGET', key, era_field) or nil) or 0
local id = doc.base .. '.' .. string.format('%d', era)
local found = put('HMGET', key, 'a:' .. id, 'w:' .. id, 'e:' .. id)
local expires = whole(found[3] or nil)
if found[1] and expires then return {era, sent(found[1]), sent(found[2]), expires, NOW_MS, 0} end
local count = whole(put('HGET', key, '#') or nil) or 0
if count >= doc.most then return {-1} end
expires = NOW_MS + doc.timeout
put('HSET', key, 'a:' .. id, doc.text, 's:' .. id, doc.sig or '', 'e:' .. id, string.format('%d', expires), '#', string.format('%d', count + 1))
prolong(key)
put('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', NOW_MS))
put('ZADD', KEYS[2], string.format('%d', expires), doc.job .. ' ' .. id)
put('ZREMRANGEBYRANK', KEYS[2], 0, -10001)
prolong(KEYS[2])
return {era, doc.text, '', expires, NOW_MS, 1}
