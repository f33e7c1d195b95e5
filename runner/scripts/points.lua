-- Priorities: the lanes of a queue that differ in priority are served as one line. First comes the lane whose first job has
-- waited longest, where each point of priority counts as a second of waiting: so a low job is overtaken only by jobs that
-- came at most 2,000 s after it, and never starves. Stands before turn.lua.

-- Unix ms of a time as RQ writes it; of anything else, now.
local function ms_of(text)
  local year, month, day, hour, minute, second, ms =
    string.match(text or '', '^(%d%d%d%d)%-(%d%d)%-(%d%d)T(%d%d):(%d%d):(%d%d)%.(%d%d%d)%d*Z$')
  if not year then return NOW_MS end
  year, month = tonumber(year), tonumber(month)
  if month <= 2 then year, month = year - 1, month + 12 end
  local days = 365 * year + math.floor(year / 4) - math.floor(year / 100) + math.floor(year / 400)
    + math.floor((153 * (month - 3) + 2) / 5) + tonumber(day) - 719469
  return ((days * 24 + tonumber(hour)) * 60 + tonumber(minute)) * 60000 + tonumber(second) * 1000 + tonumber(ms)
end

-- Since when the first job of a lane waits, its points taken off; nil for an empty lane.
local function weight_of(list, points)
  local id = pcall_('LINDEX', list, 0)
  if not id or wrong(id) then return nil end
  local found = fields(RQ .. 'job:' .. id, 'enqueued_at')
  return math.min(ms_of(found and found[1]), NOW_MS) - 1000 * points
end

-- Returns a function that tells the number of the next lane to pop from, or nil when all are empty. `names`: the lanes,
-- those of one queue side by side; `points`: their priorities; `skip`: so many KEYS stand before theirs.
local function by_points(names, points, skip)
  local weights, first, last = {}, 1, 0
  local function group()
    first = last + 1
    if first > #names then return false end
    local queue = queue_of(names[first])
    last = first
    while last < #names and queue_of(names[last + 1]) == queue do last = last + 1 end
    for at = first, last do weights[at] = weight_of(KEYS[skip + at], points[at]) end
    return true
  end
  local popped
  return function()
    if popped then weights[popped] = weight_of(KEYS[skip + popped], points[popped]) end
    popped = nil
    while true do
      for at = first, last do
        if weights[at] and (not popped or weights[at] < weights[popped]) then popped = at end
      end
      if popped or not group() then return popped end
    end
  end
end

-- Tells the lane to pop from in the order of the caller; `empty`: the last one told was.
local function in_order()
  local at = 1
  return function(empty)
    if empty then at = at + 1 end
    return at <= #doc.lanes and at or nil
  end
end
