-- Shared by `give_back` and `sweep`: a worker will not finish a request.

-- Tell the API node that no frame of this attempt will follow.
local function send_error(id, node, attempt, reason)
  local frame = {request_id = id, attempt = tonumber(attempt), first_index = 0, token_ids = {},
                 finish_reason = 'error', error = reason}
  local message = {type = 'StepFrames', worker = '', step = 0, frames = {frame}}
  send_frames(node, cmsgpack.pack(message))
end

-- Back into the queue if the API node has seen nothing of it, else to the API node as lost.
-- `penalty` is 1 where the worker died of it (perhaps), 0 where it gave it back in good order.
local function lose(id, penalty, max_attempts)
  local fields = call('HMGET', request_key(id), 'tenant', 'node', 'attempt', 'key', 'weight', 'work',
                      'body', 'cancelled')
  local tenant, node, attempt = fields[1], fields[2], fields[3]
  if not attempt then
    call('ZREM', LEASE, id)
  elseif fields[8] then
    drop(id)
  elseif not fields[7] then
    send_error(id, node, attempt, 'worker_lost')
    drop(id)
  elseif attempt + penalty > max_attempts then
    send_error(id, node, attempt, 'too_many_attempts')
    drop(id)
  else
    release(id, tenant, fields[5], fields[6])
    call('HSET', request_key(id), 'state', 'queued', 'attempt', string.format('%d', attempt + penalty))
    call('HDEL', request_key(id), 'worker')
    enqueue(id, tenant, fields[4])
  end
end
