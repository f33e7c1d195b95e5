-- Mailboxes and topics: one stream each, whose consumers are nodes. A mailbox has one group, so each letter goes to one
-- receiver and is removed when that is done with it; a topic has a group for each job that subscribed.
--
-- KEYS   1 rf:mail:TENANT:BOX   2 rf:box:TENANT:BOX   3 rf:dead:TENANT:BOX
-- ARGV   1  {rq, rf, op, tenant, box, topic, group, node, ...}      2  the signed letter, or word that one was taken
--        send: sig, until, size, corr, confirm, most, most_bytes
--        receive: count, bytes, hold_ms, most_times, wait      take: corr, wait
--        ack: id, times, taken, sig      keep: id, times      back, bury: ids ({id, times} each), why      look
-- REPLY  send: {full} | {sent, id, subscribers}      receive, take: {none} | {letters, missed, {id, letter, sig, times}...}
--        | {crowded}      ack, keep: {done} | {lost}      back, bury: {done}
--        look: {letters, held, dead, bytes, subscribers}
-- RACE   a letter is counted, moved to the dead ones and given to one node in one step. `times`, how often it was given
--        out, is what a node shows to have it still: a second receiver makes the first one's word void.
-- RF bell:NODE, named by whoever waits or sent, wakes that node: one look at the store per node, not per job.

local BOX, FACTS, DEAD = KEYS[1], KEYS[2], KEYS[3]
local GROUP, NODE, TOPIC = doc.group, doc.node, doc.topic
local DEAD_S, DEAD_MAX = 604800, 100
-- A box is forgotten so long after its last letter; a box of answers, which every job has, sooner.
local LIFE_S = string.sub(doc.box, 1, 1) == '@' and 90000 or 691200
local BELL_S, BELL_MAX, WAIT_MS = 3600, 1000, 60000
local LOOK, SUBSCRIBERS, FAR_MS = 64, 64, 86400000
-- Larger than any letter with its signature: nobody but who writes the store made it.
local MOST_LETTER, MOST_SIG = 36864, 512

for key, kind in pairs({[BOX] = 'stream', [FACTS] = 'hash', [DEAD] = 'stream'}) do
  local found = call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then call('DEL', key) end
end

local function number(name)
  return whole(call('HGET', FACTS, name) or nil) or 0
end

local function add(name, by)
  local value = math.max(0, number(name) + by)
  call('HSET', FACTS, name, string.format('%d', value))
  -- Whoever takes a letter out of a box whose facts are gone must not leave a number without an end.
  if call('TTL', FACTS) < 0 then call('EXPIRE', FACTS, LIFE_S) end
  return value
end

local function facts_of(entry)
  local found, words = {}, entry[2]
  for i = 1, #words, 2 do found[words[i]] = words[i + 1] end
  return found
end

local function entry_at(id)
  return call('XRANGE', BOX, id, id)[1]
end

local function drop(id, facts)
  if call('XDEL', BOX, id) == 1 then add('bytes', -(whole(facts.size) or 0)) end
end

local function over(facts)
  return (whole(facts['until']) or 0) <= NOW_MS
end

local function swollen(facts)
  return #(facts.letter or '') > MOST_LETTER or #(facts.sig or '') > MOST_SIG
end

-- Takes a letter out for good, and keeps it among the dead ones for whoever looks.
local function retire(id, facts, why, times)
  local letter, sig = facts.letter or '', facts.sig or ''
  if swollen(facts) then letter, sig, why = '', '', 'unsigned' end
  put('XADD', DEAD, 'MAXLEN', DEAD_MAX, '*', 'letter', letter, 'sig', sig, 'why', why, 'times', times)
  call('EXPIRE', DEAD, DEAD_S)
  pcall_('XACK', BOX, GROUP, id)
  if not TOPIC then drop(id, facts) end
end

local function ring(node, ...)
  if not string.match(node or '', '^[a-z0-9][a-z0-9%-]*$') then return end
  local key = RF .. 'bell:' .. node
  put('XADD', key, 'MAXLEN', '~', BELL_MAX, '*', ...)
  call('EXPIRE', key, BELL_S)
end

-- Whoever waits says so anew each time, so a bell rings once.
local function ring_waiting()
  local known = call('HGETALL', FACTS)
  for i = 1, #known, 2 do
    local node = string.match(known[i], '^w:(.+)$')
    if node then
      call('HDEL', FACTS, known[i])
      if (whole(known[i + 1]) or 0) > NOW_MS then ring(node, 'kind', 'box', 'tenant', doc.tenant, 'box', doc.box) end
    end
  end
end

local function wait_here()
  if not doc.wait then return end
  call('HSET', FACTS, 'w:' .. NODE, string.format('%d', NOW_MS + WAIT_MS))
  call('EXPIRE', FACTS, LIFE_S)
end

local function groups()
  if call('EXISTS', BOX) == 0 then return {} end
  local found = {}
  for _, row in ipairs(call('XINFO', 'GROUPS', BOX)) do
    for i = 1, #row, 2 do
      if row[i] == 'name' then found[#found + 1] = row[i + 1] end
    end
  end
  return found
end

-- A subscriber whose job has ended, or is forgotten, makes room.
local function prune(names)
  local left = 0
  for _, name in ipairs(names) do
    local state = string.match(name, '^[a-z0-9]+%-[a-z0-9]+$') and fields(RQ .. 'job:' .. name, 'rf_state')
    if not state or not state[1] or ENDED[state[1]] then
      call('XGROUP', 'DESTROY', BOX, name)
      call('HDEL', FACTS, 's:' .. name)
    else
      left = left + 1
    end
  end
  return left
end

local function join()
  local names = TOPIC and groups() or {}
  for _, name in ipairs(names) do
    if name == GROUP then return true end
  end
  if #names >= SUBSCRIBERS and prune(names) >= SUBSCRIBERS then return false end
  local made = pcall_('XGROUP', 'CREATE', BOX, GROUP, TOPIC and '$' or '0', 'MKSTREAM')
  if wrong(made) and not string.find(made.err, 'BUSYGROUP', 1, true) then error(made.err) end
  if TOPIC and not wrong(made) then call('HSET', FACTS, 's:' .. GROUP, string.format('%d', number('count'))) end
  call('EXPIRE', BOX, LIFE_S)
  call('EXPIRE', FACTS, LIFE_S)
  return true
end

local function held(id, times)
  local rows = pcall_('XPENDING', BOX, GROUP, id, id, 1)
  local row = not wrong(rows) and rows[1]
  return row and row[2] == NODE and row[4] == times
end

local function send()
  if call('XLEN', BOX) == 0 then call('HSET', FACTS, 'bytes', '0') end
  for _ = 1, LOOK do
    local head = call('XRANGE', BOX, '-', '+', 'COUNT', 1)[1]
    if not head then break end
    local facts = facts_of(head)
    local full = call('XLEN', BOX) >= doc.most or number('bytes') + doc.size > doc.most_bytes
    if TOPIC and (full or over(facts)) then drop(head[1], facts)
    elseif not TOPIC and over(facts) then retire(head[1], facts, 'expired', 0)
    else break end
  end
  if call('XLEN', BOX) >= doc.most or number('bytes') + doc.size > doc.most_bytes then return {'full'} end
  local id = put('XADD', BOX, '*', 'letter', ARGV[2], 'sig', doc.sig, 'until', string.format('%d', doc['until']), 'size',
    doc.size, 'corr', doc.corr, 'from', NODE, 'confirm', doc.confirm and '1' or '0', 'count', add('count', 1))
  add('bytes', doc.size)
  call('EXPIRE', BOX, LIFE_S)
  call('EXPIRE', FACTS, LIFE_S)
  ring_waiting()
  return {'sent', id, TOPIC and #groups() or 0}
end

local function receive()
  if not join() then return {'crowded'} end
  local found, bytes, missed = {}, 0, 0
  local function give(entry, times)
    local facts = facts_of(entry)
    if over(facts) or swollen(facts) then
      retire(entry[1], facts, 'expired', times)
    else
      found[#found + 1] = {entry[1], facts.letter or '', facts.sig or '', times}
      bytes = bytes + #(facts.letter or '')
    end
    return facts
  end
  for _, row in ipairs(call('XPENDING', BOX, GROUP, 'IDLE', doc.hold_ms, '-', '+', LOOK)) do
    if #found >= doc.count or bytes >= doc.bytes then break end
    local id, times = row[1], row[4]
    local entry = entry_at(id)
    if not entry then
      call('XACK', BOX, GROUP, id)
    elseif times >= doc.most_times then
      retire(id, facts_of(entry), 'deliveries', times)
    else
      call('XCLAIM', BOX, GROUP, NODE, doc.hold_ms, id)
      give(entry, times + 1)
    end
  end
  while #found < doc.count and bytes < doc.bytes do
    local reply = call('XREADGROUP', 'GROUP', GROUP, NODE, 'COUNT', 1, 'STREAMS', BOX, '>')
    if not reply then break end
    local count = whole(give(reply[1][2][1], 1).count)
    if TOPIC and count then
      missed = missed + math.max(0, count - number('s:' .. GROUP) - 1)
      call('HSET', FACTS, 's:' .. GROUP, string.format('%d', count))
    end
  end
  if #found == 0 then
    wait_here()
    return {'none'}
  end
  return {'letters', missed, unpack(found)}
end

local function take()
  for _, entry in ipairs(call('XRANGE', BOX, '-', '+', 'COUNT', doc.most)) do
    local facts = facts_of(entry)
    if facts.corr == doc.corr and not swollen(facts) then
      pcall_('XACK', BOX, GROUP, entry[1])
      drop(entry[1], facts)
      return {'letters', 0, {entry[1], facts.letter or '', facts.sig or '', 1}}
    end
  end
  wait_here()
  return {'none'}
end

local function ack()
  if not held(doc.id, doc.times) then return {'lost'} end
  local entry = entry_at(doc.id)
  call('XACK', BOX, GROUP, doc.id)
  if not entry then return {'lost'} end
  local facts = facts_of(entry)
  if not TOPIC then drop(doc.id, facts) end
  if facts.confirm == '1' and doc.taken then ring(facts.from, 'kind', 'taken', 'word', ARGV[2], 'sig', doc.sig) end
  return {'done'}
end

local function keep()
  if not held(doc.id, doc.times) then return {'lost'} end
  call('XCLAIM', BOX, GROUP, NODE, 0, doc.id, 'JUSTID')
  return {'done'}
end

local function give_up(bury)
  for _, one in ipairs(doc.ids) do
    if held(one[1], one[2]) then
      local entry = bury and entry_at(one[1])
      if entry then
        retire(one[1], facts_of(entry), doc.why, one[2])
      else
        call('XCLAIM', BOX, GROUP, NODE, 0, one[1], 'IDLE', FAR_MS, 'JUSTID')
      end
    end
  end
  if not bury then ring_waiting() end
  return {'done'}
end

local function look()
  local pending = pcall_('XPENDING', BOX, GROUP)
  local held_count = not wrong(pending) and pending[1] or 0
  return {call('XLEN', BOX), held_count, call('XLEN', DEAD), number('bytes'), TOPIC and #groups() or 0}
end

if doc.op == 'send' then return send() end
if doc.op == 'receive' then return receive() end
if doc.op == 'take' then return take() end
if doc.op == 'ack' then return ack() end
if doc.op == 'keep' then return keep() end
if doc.op == 'back' then return give_up(false) end
if doc.op == 'bury' then return give_up(true) end
return look()
