-- Writes down a person's signed word on a call that waits, or on a budget that is used up. Nodes check the signature.
--
-- KEYS   1 rf:ask:JOB or rf:budget:TENANT:KEY   2 rf:asks:TENANT   3 rf:due (ask)
-- ARGV   1  {rq, rf, form, word, ask, job, key, command}
--           word: "SIG COMMAND"   form ask: ask = the question's id, job   form budget: key, command = the command's id
-- REPLY  {stored, wait} | {unknown} | {expired} | {decided, word} | {full}
--           wait: how the job waits (ask)
-- RACE   of two words on one question the first counts, and is never replaced.

local MOST_WORDS = 1000
local key = KEYS[1]
if doc.form == 'budget' then
  if call('EXISTS', key) == 0 then return {'unknown'} end
  local count = (whole(put('HGET', key, '#') or nil) or 0) + 1
  if count > MOST_WORDS then return {'full'} end
  put('HSET', key, '#', string.format('%d', count))
  put('HSET', key, 'w:' .. doc.command, doc.word)
  -- Nodes that spend from it keep it longer; nobody else makes it stay.
  if call('TTL', key) < 0 then call('EXPIRE', key, 604800) end
  put('ZREM', KEYS[2], 'budget ' .. doc.key)
  return {'stored', ''}
end

local found = put('HMGET', key, 'a:' .. doc.ask, 'w:' .. doc.ask, 'e:' .. doc.ask)
if not found[1] then return {'unknown'} end
if found[2] then return {'decided', found[2]} end
if (whole(found[3] or nil) or 0) <= NOW_MS then return {'expired'} end
put('HSET', key, 'w:' .. doc.ask, doc.word)
put('ZREM', KEYS[2], doc.job .. ' ' .. doc.ask)
-- A job that parked for this question is due now; one that is about to park is woken by its node (ask.lua, wake).
local told, facts = pcall(cjson.decode, found[1])
if told and type(facts) == 'table' and facts.how == 'requeue' and call('ZSCORE', KEYS[3], doc.job) then
  call('ZADD', KEYS[3], string.format('%d', NOW_MS), doc.job)
end
return {'stored', found[1]}
