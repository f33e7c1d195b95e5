-- What every script starts with. ARGV[1] is one JSON document; doc.rq and doc.rf are the two key prefixes.
-- A key of one job, tenant or worker may hold a wrong type, or be a stream that has no ids left (whoever writes the store
-- can do that): such a key is replaced, never allowed to abort a script half-way, because an abort after a pop would lose
-- the popped job. What stands here costs time at each enqueue: what that does not need stands in prelude.lua.

local doc = cjson.decode(ARGV[1])
local RQ, RF = doc.rq, doc.rf
local call, pcall_ = redis.call, redis.pcall
local EVENT_TTL_S, EVENT_MAX = 2592000, 100000

local time = call('TIME')
local NOW_S, NOW_US = tonumber(time[1]), tonumber(time[2])
local NOW_MS = NOW_S * 1000 + math.floor(NOW_US / 1000)

-- The form in which RQ writes times. Source: the proleptic Gregorian calendar, eras of 146,097 days.
local function iso(s, us)
  local days = math.floor(s / 86400)
  local rest = s - days * 86400
  local shifted = days + 719468
  local era = math.floor(shifted / 146097)
  local day = shifted - era * 146097
  local year = math.floor((day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  local rank = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * rank + 2) / 153)
  local date = rank - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ', year, month, date,
    math.floor(rest / 3600), math.floor(rest / 60) % 60, rest % 60, us)
end
local NOW_ISO = iso(NOW_S, NOW_US)

local function wrong(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

-- Source: the server's own words for a key of another type, and for a stream whose last id is the largest there is.
local function unfit(err)
  return string.find(err, 'WRONGTYPE', 1, true) or string.find(err, 'last possible ID', 1, true)
    or string.find(err, 'equal or smaller than the target stream', 1, true)
end

-- Reads or writes a key that is not everybody's; one that is unfit is replaced.
local function put(command, key, ...)
  local reply = pcall_(command, key, ...)
  if wrong(reply) then
    if not unfit(reply.err) then error(reply.err) end
    call('DEL', key)
    reply = call(command, key, ...)
  end
  return reply
end

local function tenant_of(id)
  local tenant = string.match(id, '^([a-z0-9]+)%-')
  return tenant and #tenant <= 32 and tenant or 'main'
end

-- One entry of a tenant's events. Entries of agents are signed; those of scripts have an empty signature.
local prolonged = {}
local function emit(tenant, body, signature)
  local key = RF .. 'ev:' .. tenant
  put('XADD', key, 'MAXLEN', '~', EVENT_MAX, '*', 'event', body, 'sig', signature)
  if not prolonged[key] then
    -- A look costs less than a write, of which there need not be more than one a minute.
    if call('TTL', key) < EVENT_TTL_S - 60 then call('EXPIRE', key, EVENT_TTL_S) end
    prolonged[key] = true
  end
end

local function note(kind, id, attempt, more)
  local event = more or {}
  event.type, event.job, event.attempt, event.at_ms = kind, id, attempt, NOW_MS
  emit(tenant_of(id), cjson.encode(event), '')
end

-- Wakes agents that wait for work: a few for a batch, and each that finds more than it can take wakes another (turn.lua,
-- call_next). So a burst gets as many agents as its jobs last long, and few find nothing. As long as nobody has fetched a
-- wake-up, nobody waits for this lane.
local WAKE_SHARE, WAKE_MAX = 16, 16
local function wake(lane, count)
  local key = RF .. 'wake:' .. lane
  local unfetched = pcall_('LLEN', key)
  if not wrong(unfetched) and unfetched > 0 then
    -- More than we ever put there: somebody else did, to have agents look for nothing.
    if unfetched > 2 * WAKE_MAX then
      call('LTRIM', key, 0, 0)
      call('EXPIRE', key, 60)
    end
    return
  end
  local ones = {'1'}
  for i = 2, math.min(math.ceil((count or 1) / WAKE_SHARE), WAKE_MAX) do ones[i] = '1' end
  put('LPUSH', key, unpack(ones))
  -- Who looks for work looks every second anyway: what is left of an older list may go with its time.
  call('EXPIRE', key, 60)
end
