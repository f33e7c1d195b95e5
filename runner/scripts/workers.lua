-- RQ's records of workers, as a turn changes them; stands before turn.lua.

-- What a turn says of each worker, written once at its end.
local workers = {}
local function set_worker(worker, state, counter_name, wall)
  if worker == '' then return end
  local told = workers[worker]
  if not told then
    told = {}
    workers[worker] = told
  end
  told.state = state
  if counter_name then told[#told + 1] = {counter_name, wall} end
end

local COUNTED = {'birth', 'successful_job_count', 'failed_job_count', 'total_working_time'}
local function write_workers()
  for worker, told in pairs(workers) do
    local key = RQ .. 'worker:' .. worker
    local found = fields(key, unpack(COUNTED))
    -- A worker whose hash has lapsed is written anew by the next renewal, whole and with its TTL.
    if found and found[1] then
      local state = told.state
      -- The slot may carry the next attempt already, while an overruled retry of the last one still waits for its end.
      if state == 'idle' then
        local others = pcall_('SCARD', key .. ':executions')
        if not wrong(others) and others > 0 then state = 'busy' end
      end
      for _, counted in ipairs(told) do
        -- A counter that is no number stays as it is.
        local at = counted[1] == 'successful_job_count' and 2 or 3
        local count, worked = whole(found[at] or '0'), tonumber(found[4] or '0')
        found[at] = count and string.format('%d', count + 1) or found[at]
        found[4] = worked and string.format('%.6f', worked + counted[2]) or found[4]
      end
      local entry = {'state', state}
      for at = 2, #told > 0 and 4 or 0 do
        if found[at] then
          entry[#entry + 1] = COUNTED[at]
          entry[#entry + 1] = found[at]
        end
      end
      call('HSET', key, unpack(entry))
    end
  end
end
