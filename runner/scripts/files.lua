-- Reads the index of one tree of files, or changes it: a job's /state, or what an agent's name remembers.
--
-- KEYS   1 rf:state:JOB or rf:mem:TENANT:AGENT      the index: path -> entry, ".fence", ".version", ".bytes", ".entries"
--        2 rf:statedata:JOB or rf:memdata:…         the contents: path -> bytes
-- ARGV   1  {rq, rf, op, fence, known, ttl, depth, cap, file, entries, entry, owner, merge, list}
--           op: "load", "change" or "read" (list = [{path}]); fence: the attempt that owns the tree (0: shared); known: version that the caller has;
--           ttl: seconds; depth: directories above it are always there; cap, file, entries: bounds; entry: what each counts; merge: appends of
--           others in between are none of our business
--           list: {op = "put"|"add"|"dir"|"del"|"mov", path, base, …}; base: version that the caller saw (0: nothing)
--             put, add: data (number of ARGV), ttl (ms left, 0: no end), token, skip (see below)
--             mov: to, over (version of what it replaces, 0: nothing)
--        2+ byte strings
-- REPLY  {"fence"} a newer attempt owns the tree · {"gone"} the store lost it · {"same", now} ·
--        {"index", version, now, {field, value, …}} ·
--        {"swollen"} it holds more than any tree may: a node does not read that ·
--        {"content", bytes} or {"none"} ·
--        {"done", version before, version, {size, matched (1, 0), …}} of put and add ·
--        {"conflict"|"exists"|"not_found"|"not_empty"|"quota"|"too_large", path}: nothing was changed
-- RACE   a late write of an older attempt, and two jobs that change one file: who saw an older version than there is
--        changes nothing. All of the list or nothing. A change whose answer got lost may be sent again: its token is
--        known, and of what it appended the first ``skip`` bytes are there already.

-- SLACK: fields that are no entries, and entries whose time is over.
local ENTRY_BYTES, MOST_NAME, SLACK, AHEAD_MS = doc.entry, 8192, 1024, 1e12
local index, data = KEYS[1], KEYS[2]
for _, key in ipairs(KEYS) do
  local kind = call('TYPE', key).ok
  if kind ~= 'none' and kind ~= 'hash' then call('DEL', key) end
end

local function number(field)
  return whole(call('HGET', index, field) or nil) or 0
end

local function text(value)
  return string.format('%d', value)
end

local bytes, entries = number('.bytes'), number('.entries')

local function parsed(value)
  local kind, version, size, at, ends, token, owner = string.match(value or '',
    '^([fd]) (%d+) (%d+) (%d+) (%d+) (%S+) (%S+)$')
  if not kind then return nil end
  return {kind = kind, version = tonumber(version), size = tonumber(size), at = at, ends = tonumber(ends), token = token,
    owner = owner}
end

local function forget(path, entry)
  call('HDEL', index, path)
  call('HDEL', data, path)
  bytes, entries = bytes - entry.size - ENTRY_BYTES, entries - 1
end

local function entry_of(path)
  local entry = parsed(call('HGET', index, path))
  if entry and entry.ends > 0 and entry.ends <= NOW_MS then
    forget(path, entry)
    return nil
  end
  return entry
end

local function store(path, entry)
  call('HSET', index, path, table.concat({entry.kind, text(entry.version), text(entry.size), entry.at, text(entry.ends),
    entry.token, entry.owner}, ' '))
end

-- Takes away what has ended and counts the rest anew; returns the entries as they are stored.
local function counted()
  local found, all = {}, call('HGETALL', index)
  bytes, entries = 0, 0
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 1) == '/' then
      local entry = parsed(all[i + 1])
      if entry and (entry.ends == 0 or entry.ends > NOW_MS) and #all[i] <= MOST_NAME then
        bytes, entries = bytes + entry.size + ENTRY_BYTES, entries + 1
        found[#found + 1] = all[i]
        found[#found + 1] = all[i + 1]
      else
        call('HDEL', index, all[i])
        call('HDEL', data, all[i])
      end
    end
  end
  return found
end

local function kept()
  call('HSET', index, '.bytes', text(math.max(0, bytes)), '.entries', text(math.max(0, entries)))
  call('EXPIRE', index, text(doc.ttl))
  call('EXPIRE', data, text(doc.ttl))
end

local function below(path)
  local found, start = {}, path .. '/'
  for _, other in ipairs(call('HKEYS', index)) do
    if string.sub(other, 1, #start) == start and entry_of(other) then found[#found + 1] = other end
  end
  return found
end

local function has_place(path)
  local parent = string.match(path, '^(.*)/[^/]*$')
  local _, depth = string.gsub(parent, '/', '')
  if depth <= doc.depth then return true end
  local entry = entry_of(parent)
  return entry ~= nil and entry.kind == 'd'
end

if doc.op == 'read' then
  local path = doc.list[1].path
  if call('HSTRLEN', data, path) > doc.file then return {'swollen'} end
  local content = call('HGET', data, path)
  return content and {'content', content} or {'none'}
end

local version = number('.version')
-- Versions follow the clock: one far ahead of it was written by nobody who counts, and there would be no next one.
if version > NOW_MS + AHEAD_MS then version = 0 end
if doc.fence > 0 then
  local fence = number('.fence')
  if fence > doc.fence then return {'fence'} end
  if doc.op == 'change' and fence < doc.fence then return {'gone'} end
  if fence < doc.fence then
    call('HSET', index, '.fence', text(doc.fence))
    call('EXPIRE', index, text(doc.ttl))
  end
end
if doc.op == 'load' then
  if version == doc.known then return {'same', text(NOW_MS)} end
  if call('HLEN', index) > doc.entries + SLACK then return {'swollen'} end
  local found = counted()
  if #found > 0 or doc.fence > 0 then kept() end
  return {'index', text(version), text(NOW_MS), found}
end

-- Judges one change; returns what is wrong with it, or nil and how it grows the tree: bytes, entries.
local JUDGE = {}
function JUDGE.put(one)
  local have = entry_of(one.path)
  if have and have.kind == 'd' then return 'exists' end
  one.again = have and one.token ~= '-' and have.token == one.token
  one.matched = one.again or (have and have.version or 0) == one.base
  if one.op == 'add' and not have then return 'conflict' end
  if not one.matched and not (one.op == 'add' and doc.merge) then return 'conflict' end
  if not have and not has_place(one.path) then return 'not_found' end
  one.bytes = ARGV[one.data]
  if one.op == 'add' then
    if one.again then one.bytes = string.sub(one.bytes, one.skip + 1) end
    one.ends, one.size = have.ends, have.size + #one.bytes
  else
    one.ends, one.size = one.ttl > 0 and NOW_MS + one.ttl or 0, #one.bytes
  end
  if one.size > doc.file then return 'too_large' end
  if have then return nil, one.size - have.size, 0 end
  return nil, one.size + ENTRY_BYTES, 1
end
JUDGE.add = JUDGE.put
function JUDGE.dir(one)
  if entry_of(one.path) then return 'exists' end
  if not has_place(one.path) then return 'not_found' end
  return nil, ENTRY_BYTES, 1
end
function JUDGE.del(one)
  local have = entry_of(one.path)
  if not have then return 'not_found' end
  if have.version ~= one.base then return 'conflict' end
  if have.kind == 'd' and #below(one.path) > 0 then return 'not_empty' end
  return nil, 0, 0
end
function JUDGE.mov(one)
  local have, there = entry_of(one.path), entry_of(one.to)
  if not have then return 'not_found' end
  if have.version ~= one.base or (there and there.version or 0) ~= one.over then return 'conflict' end
  if there and there.kind == 'd' and #below(one.to) > 0 then return 'not_empty' end
  if not has_place(one.to) then return 'not_found' end
  return nil, 0, 0
end

local function judged()
  local more, new = 0, 0
  for _, one in ipairs(doc.list) do
    local fault, growth, count = JUDGE[one.op](one)
    if fault then return {fault, one.path} end
    more, new = more + growth, new + count
  end
  if (more > 0 and bytes + more > doc.cap) or (new > 0 and entries + new > doc.entries) then
    return {'quota', doc.list[1].path}
  end
  bytes, entries = bytes + more, entries + new
  return nil
end

local fault = judged()
if fault and fault[1] == 'quota' then
  counted()
  fault = judged()
end
if fault then return fault end

local before = version
version = math.max(version + 1, NOW_MS)

local function moved(from, to)
  call('HSET', index, to, call('HGET', index, from))
  call('HDEL', index, from)
  local content = call('HGET', data, from)
  if content then call('HSET', data, to, content) end
  call('HDEL', data, from)
end

local DO = {}
function DO.put(one)
  local content = one.bytes
  if one.op == 'add' then content = (call('HGET', data, one.path) or '') .. content end
  call('HSET', data, one.path, content)
  store(one.path, {kind = 'f', version = version, size = one.size, at = text(NOW_MS), ends = one.ends, token = one.token,
    owner = doc.owner})
end
DO.add = DO.put
function DO.dir(one)
  store(one.path, {kind = 'd', version = version, size = 0, at = text(NOW_MS), ends = 0, token = '-', owner = doc.owner})
end
function DO.del(one)
  forget(one.path, entry_of(one.path))
end
function DO.mov(one)
  local there = entry_of(one.to)
  if there then forget(one.to, there) end
  for _, path in ipairs(below(one.path)) do moved(path, one.to .. string.sub(path, #one.path + 1)) end
  moved(one.path, one.to)
end

local answers = {}
for _, one in ipairs(doc.list) do
  DO[one.op](one)
  if one.bytes then
    answers[#answers + 1] = text(one.size)
    answers[#answers + 1] = one.matched and '1' or '0'
  end
end
call('HSET', index, '.version', text(version))
kept()
return {'done', text(before), text(version), answers}
