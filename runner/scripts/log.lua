-- Adds output of one attempt to its job's log.
--
-- KEYS   1 rq:job:ID   2 rf:log:ID
-- ARGV   1  {rq, rf, node, boot, ttl, attempt, slot ("-" for none), execution, chunks: [[fd, offset, skipped, data]]}
--           ttl: seconds after the last entry; data: number of ARGV, 0 = none; offsets grow from chunk to chunk
--        2+ byte strings
-- REPLY  1, or 0: the attempt is not this agent start's any more and nothing was added
-- RACE   an agent that was stopped past its lease writes no line of the old attempt behind those of the next one; a call
--        that is sent again because its reply got lost adds nothing twice.

local claim = doc.node .. '/' .. doc.boot .. '/' .. doc.slot
local found = fields(KEYS[1], 'rf_claim', 'rf_attempt', 'rf_state')
if not found or found[1] ~= claim or whole(found[2]) ~= doc.attempt or not HELD[found[3] or ''] then return 0 end

-- What of this very run is stored already.
local known = -1
local newest = pcall_('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
if not wrong(newest) and newest[1] then
  local entry = {}
  for i = 1, #newest[1][2], 2 do entry[newest[1][2][i]] = newest[1][2][i + 1] end
  if entry.x == doc.execution then known = whole(entry.o) or -1 end
end

for _, chunk in ipairs(doc.chunks) do
  local fd, offset, skipped, data = chunk[1], chunk[2], chunk[3], chunk[4]
  if offset > known then
    local entry = {'f', string.format('%d', fd), 'o', string.format('%d', offset), 'd', data > 0 and ARGV[data] or '',
      'x', doc.execution}
    if skipped > 0 then
      entry[#entry + 1] = 'skipped'
      entry[#entry + 1] = string.format('%d', skipped)
    end
    put('XADD', KEYS[2], '*', unpack(entry))
  end
end
call('EXPIRE', KEYS[2], string.format('%d', doc.ttl))
return 1
