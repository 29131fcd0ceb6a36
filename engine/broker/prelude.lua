-- What the scripts share; it stands in front of each of them.
--
-- KEYS[1] is the prefix of every key of one model (keys.py lists them). It is no key itself: its hash
-- tag sends the script to the shard that holds them all.
--
-- A request is a hash: state (queued or taken), tenant, node, key, weight, work (predicted seconds of
-- prefill), attempt, worker, cancelled ('1' once nobody wants it), authorized (the fence, where it
-- differs from the body's), and body: the encoded message, until the first frame leaves. From then on
-- the request never returns to the queue.
local prefix = KEYS[1]
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local TENANTS = prefix .. 'tenants'
local IDLE = prefix .. 'idle'
local LAST = prefix .. 'last'
local LEASE = prefix .. 'lease'
local WAKE = prefix .. 'wake'
local NEWCOMERS = prefix .. 'newcomers'
local NODES = prefix .. 'nodes'
local BORN = prefix .. 'born'
local TAKEN = prefix .. 'taken'

local WAKE_LIMIT = 64
local CONTROL_LIMIT = 10000
local CONTROL_MS = 60000
local FRAMES_LIMIT = 4096 -- messages to one API node; older ones are dropped and show as a gap
local FRAMES_MS = 60000

local function request_key(id) return prefix .. 'r:' .. id end
local function queue_key(tenant) return prefix .. 'q:' .. tenant end
local function node_key(node) return prefix .. 'node:' .. node end

-- The time at which this Redis was found empty: whoever remembers another one has seen a wipe.
local function born()
  local since = call('GET', BORN)
  if not since then
    since = string.format('%d', now)
    call('SET', BORN, since)
  end
  return since
end

-- One token wakes one worker. The list is bounded because a token only says "there is something".
local function wake()
  if call('LLEN', WAKE) < WAKE_LIMIT then call('LPUSH', WAKE, '1') end
end

-- A tenant comes back with something to take. It keeps its debts, but time away earns nothing: it is
-- lifted to the least-served tenant that waits, or to the one that waited last (VTC, arXiv 2401.00588).
local function activate(tenant)
  if call('ZSCORE', TENANTS, tenant) then return end
  local own = tonumber(call('ZSCORE', IDLE, tenant) or '0')
  local least = call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')[2]
  if not least then
    local last = call('GET', LAST)
    least = last and call('ZSCORE', IDLE, last)
  end
  call('ZADD', TENANTS, math.max(own, tonumber(least or '0')), tenant)
  call('ZREM', IDLE, tenant)
  -- A worker whose window is full of others' requests has spare room for this tenant's first one.
  if call('LLEN', NEWCOMERS) < WAKE_LIMIT then call('LPUSH', NEWCOMERS, '1') end
end

-- A tenant whose queue is empty leaves; what it used stays known.
local function deactivate_if_empty(tenant)
  if call('EXISTS', queue_key(tenant)) == 1 then return end
  local virtual = call('ZSCORE', TENANTS, tenant)
  if not virtual then return end
  call('ZREM', TENANTS, tenant)
  call('ZADD', IDLE, virtual, tenant)
  call('SET', LAST, tenant)
end

-- Virtual seconds (seconds / weight) that a tenant has used, wherever it is listed.
local function charge(tenant, virtual_seconds)
  if virtual_seconds == 0 then return end
  if call('ZSCORE', TENANTS, tenant) then
    call('ZINCRBY', TENANTS, virtual_seconds, tenant)
  else
    call('ZINCRBY', IDLE, virtual_seconds, tenant)
  end
end

local function enqueue(id, tenant, key)
  call('ZADD', queue_key(tenant), key, id)
  activate(tenant)
  wake()
end

-- A worker lets go of a request: the advance that `take` charged goes back.
local function release(id, tenant, weight, work)
  call('ZREM', LEASE, id)
  charge(tenant, -(tonumber(work) / tonumber(weight)))
end

-- Forget a request in whatever state it is.
local function drop(id)
  local fields = call('HMGET', request_key(id), 'state', 'tenant', 'node', 'weight', 'work')
  local state, tenant, node = fields[1], fields[2], fields[3]
  if not state then return end
  if state == 'queued' then
    call('ZREM', queue_key(tenant), id)
    deactivate_if_empty(tenant)
  else
    release(id, tenant, fields[4], fields[5])
  end
  call('DEL', request_key(id))
  call('SREM', node_key(node), id)
end

local function tell(worker, message)
  local list = prefix .. 'control:' .. worker
  call('RPUSH', list, message)
  call('LTRIM', list, -CONTROL_LIMIT, -1)
  call('PEXPIRE', list, CONTROL_MS)
end

local function tell_cancel(worker, id, attempt)
  tell(worker, cmsgpack.pack({type = 'Cancel', request_id = id, attempt = tonumber(attempt)}))
end

local function send_frames(node, message)
  local stream = prefix .. 'frames:' .. node
  call('XADD', stream, 'MAXLEN', '~', FRAMES_LIMIT, '*', 'd', message)
  call('PEXPIRE', stream, FRAMES_MS)
end
