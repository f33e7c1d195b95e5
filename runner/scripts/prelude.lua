-- What the scripts share besides start.lua, but for a plain enqueue.

local ENDED = {finished = 1, failed = 1, killed = 1, refused = 1, expired = 1, lost = 1}
local HELD = {claimed = 1, running = 1, paused = 1, killing = 1}
local MAX_ORIGIN_SELECTORS = 200
local NOW_FLOAT = string.format('%d.%06d', NOW_S, NOW_US)

-- Reads fields of a hash; nil when the key is no hash.
local function fields(key, ...)
  local reply = pcall_('HMGET', key, ...)
  if wrong(reply) then return nil end
  return reply
end

local function whole(text)
  local number = tonumber(text)
  if number and number >= 0 and number <= 9007199254740991 and math.floor(number) == number then return number end
  return nil
end

-- A store at its limit of memory refuses a script's first write if that may need more, and no later one. What ends, renews
-- or kills begins with a write that needs none and changes nothing, so that it always goes through (A-L05).
local function go_through(command, key)
  pcall_(command, key, '-')
end

-- Redis TIME that never goes backwards, so that a lease once lapsed stays lapsed. Only lease scripts move it on.
local function fleet_ms(key, advance)
  local known = whole(pcall_('GET', key) or nil)
  if known and known >= NOW_MS then return known end
  if advance then call('SET', key, string.format('%d', NOW_MS)) end
  return NOW_MS
end

local function queue_of(lane)
  return string.match(lane, '^[^@]*')
end

-- A lane that was empty for long may have been forgotten (due.lua): who puts a job into one names it again.
local function name_lane(lane)
  put('SADD', RF .. 'lanes', lane)
end
