-- Which kill hits a job, and who may sign its end; stands after prelude.lua in every script but those of plain enqueues.

-- A stored kill is "SIGNATURE COMMAND", in a cutoff table with "SEQ " before it.
local function word(kind, seq, text)
  local signature, command = string.match(text, '^(%S+) (.*)$')
  return {kind, seq, command or '', command and signature or ''}
end

local counter_known
local function counter()
  counter_known = counter_known or whole(pcall_('GET', RF .. 'seq') or nil) or 0
  return counter_known
end

-- A sequence number that is missing, forged or from the future counts as 0: every cutoff hits it (attack 22).
local function seq_of(text)
  local seq = whole(text or nil)
  return seq and seq <= counter() and seq or 0
end

local table_sizes = {}
local function is_empty(key)
  if table_sizes[key] == nil then
    local size = pcall_('HLEN', key)
    table_sizes[key] = wrong(size) and 0 or size
  end
  return table_sizes[key] == 0
end

local function cutoff(key, seq, names)
  if is_empty(key) then return nil end
  local found = call('HMGET', key, unpack(names))
  for _, text in ipairs(found) do
    local limit, rest = string.match(text or '', '^(%d+) (.*)$')
    limit = whole(limit)
    -- A cutoff above the counter is void, or one forged field would kill every future job (attack 23).
    if limit and limit <= counter() and seq <= limit then return word('cutoff', limit, rest) end
  end
  return nil
end

local function tombstone(id)
  local tomb = pcall_('GET', RF .. 'tomb:' .. id)
  if wrong(tomb) then return {'tombstone', 0, '', ''} end
  return tomb and word('tombstone', 0, tomb) or nil
end

-- The tombstone of a job that stands above this one: a kill of a job is one of all that it started.
local function doom_above(sel)
  if not sel or not string.find(sel, 'job:', 1, true) then return nil end
  for name in string.gmatch(sel, '[^\n]+') do
    local above = string.match(name, '^job:([%w-]+)$')
    local order = above and tombstone(above)
    if order then return order end
  end
  return nil
end

-- The kill that hits a job, or nil: its tombstone (signed or not), or a cutoff of the controllers or of its tenant.
-- `sel` is a hint of the hash; node is given where the job is about to leave a node, not where it arrives at one.
local function doom(id, seq, sel, lane, node)
  local order = tombstone(id) or doom_above(sel)
  if order then return order end
  local tenant = tenant_of(id)
  local own = RF .. 'cut:' .. tenant
  if is_empty(RF .. 'cut') and is_empty(own) then return nil end
  local names = {'all', 'tenant:' .. tenant, 'queue:' .. queue_of(lane)}
  if node then names[#names + 1] = 'node:' .. node end
  for name in string.gmatch(sel or '', '[^\n]+') do
    if #names >= MAX_ORIGIN_SELECTORS then break end
    names[#names + 1] = name
  end
  return cutoff(RF .. 'cut', seq, names) or cutoff(own, seq, names)
end

-- Whether the caller may sign the end of a job that waits in a lane: readers take no other node's word (attack 3). A
-- caller that sends no `serves` may for all.
local served
local function may_sign(lane)
  if not doc.serves then return true end
  if not served then
    served = {}
    for _, name in ipairs(doc.serves) do served[name] = true end
  end
  return served[lane] == true
end
