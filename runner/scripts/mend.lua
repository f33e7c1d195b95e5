-- Makes a stream of commands anew whose last id lies ahead of every clock, with what it holds. Nothing could be added
-- behind such an id for long: who may add a command could keep every later kill from its node.
--
-- KEYS   1 rf:ctl:NODE or rf:ctl:all
-- ARGV   1  {rq, rf, ahead}   ahead: milliseconds that an id may lie ahead of Redis TIME
-- REPLY  how many entries were kept, or -1: there was nothing to mend
-- RACE   looking and replacing are one step, so no command slips in between. Readers' groups go with the old stream and
--        begin anew at its first entry: a command that is read again is carried out once, or does the same again.

local LIMIT_MS = NOW_MS + doc.ahead

local info = pcall_('XINFO', 'STREAM', KEYS[1])
local last = ''
for i = 1, wrong(info) and 0 or #info, 2 do
  if info[i] == 'last-generated-id' then last = info[i + 1] end
end
-- Longer than any whole number is ahead, too.
local ms = string.match(last, '^(%d+)-')
if not ms or (whole(ms) or math.huge) <= LIMIT_MS then return -1 end
local kept = call('XRANGE', KEYS[1], '-', string.format('%d', LIMIT_MS), 'COUNT', 10000)
call('DEL', KEYS[1])
for _, entry in ipairs(kept) do call('XADD', KEYS[1], entry[1], unpack(entry[2])) end
return #kept
