"""Lua scripts, each of which Redis runs atomically.

Keys that a script composes are on the node of its KEYS: their prefix contains the tenant's hash tag.
"""

_FORGET = """
local function forget(run, pins, blobs, version)
  redis.call('UNLINK', blobs .. ':' .. version)
  redis.call('HDEL', run, version)
  redis.call('SREM', pins, version)
end
"""

COMMIT = (
    _FORGET
    + """
-- KEYS: the run's hash, its pins, the tenant's runs.
-- ARGV: version, parent ('' for none), record, body, versions to keep, quota ('' for none), run, prefix of the run's
-- blobs, prefix of the tenant's runs.
-- Answers {'stored'}, {'refused', head or '', the version's record or ''}, or {'quota', bytes with this version}.
local run, pins, version = KEYS[1], KEYS[2], ARGV[1]
local head = redis.call('HGET', run, 'head') or ''
local record = redis.call('HGET', run, version) or ''
if record ~= '' or head ~= ARGV[2] or (head ~= '' and tonumber(version) <= tonumber(head)) then
  return {'refused', head, record}
end

local versions = {version}
for _, field in ipairs(redis.call('HKEYS', run)) do
  if tonumber(field) and redis.call('SISMEMBER', pins, field) == 0 then
    versions[#versions + 1] = field
  end
end
table.sort(versions, function(a, b) return tonumber(a) < tonumber(b) end)
local old = #versions - tonumber(ARGV[5])

if ARGV[6] ~= '' then
  local held = #ARGV[4]
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[3])) do
    local key = ARGV[9] .. ':' .. name
    for _, field in ipairs(redis.call('HKEYS', key .. ':versions')) do
      held = held + redis.call('STRLEN', key .. ':blob:' .. field)
    end
  end
  for i = 1, old do
    held = held - redis.call('STRLEN', ARGV[8] .. ':' .. versions[i])
  end
  if held > tonumber(ARGV[6]) then
    return {'quota', held}
  end
end

redis.call('SET', ARGV[8] .. ':' .. version, ARGV[4])
redis.call('HSET', run, version, ARGV[3], 'head', version)
redis.call('SADD', KEYS[3], ARGV[7])
for i = 1, old do
  forget(run, pins, ARGV[8], versions[i])
end
return {'stored'}
"""
)

REWIND = (
    _FORGET
    + """
-- KEYS: the run's hash, its pins. ARGV: version, the head that it replaces, prefix of blobs.
-- Answers the new head; the unchanged head if it is neither of the two; '' if the version does not exist.
local head = redis.call('HGET', KEYS[1], 'head')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return ''
end
if head ~= ARGV[1] and head ~= ARGV[2] then
  return head
end
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if tonumber(field) and tonumber(field) > tonumber(ARGV[1]) then
    forget(KEYS[1], KEYS[2], ARGV[3], field)
  end
end
redis.call('HSET', KEYS[1], 'head', ARGV[1])
return ARGV[1]
"""
)

DELETE = """
-- KEYS: the tenant's runs, then all keys of the run but its blobs, first its hash. ARGV: run, prefix of blobs.
-- Answers whether there was the run.
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  redis.call('UNLINK', ARGV[2] .. ':' .. field)
end
redis.call('SREM', KEYS[1], ARGV[1])
local deleted = redis.call('EXISTS', KEYS[2])
redis.call('UNLINK', unpack(KEYS, 2))
return deleted
"""

PIN = """
-- KEYS: the run's hash, its pins. ARGV: version, '1' to pin. Answers whether the version exists.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call(ARGV[2] == '1' and 'SADD' or 'SREM', KEYS[2], ARGV[1])
return 1
"""

TELL = """
-- KEYS: the run's hash, its iterations, its progress, the tenant's newest revision.
-- ARGV: iteration, its point, samples ('' for none), the samples' iteration, points to keep, bytes of them to keep.
-- Answers the revision, or '' if there is no such run.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return ''
end
local held = tonumber(redis.call('HGET', KEYS[3], 'held')) or 0
for _, point in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[1], '+inf')) do
  held = held - #point
end
held = held + #ARGV[2]
redis.call('ZREMRANGEBYSCORE', KEYS[2], ARGV[1], '+inf')
redis.call('ZADD', KEYS[2], ARGV[1], ARGV[2])
local count = redis.call('ZCARD', KEYS[2])
while count > 1 and (count > tonumber(ARGV[5]) or held > tonumber(ARGV[6])) do
  held = held - #redis.call('ZPOPMIN', KEYS[2])[1]
  count = count - 1
end
local sampled = tonumber(redis.call('HGET', KEYS[3], 'sampled'))
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[3], 'samples', ARGV[3], 'sampled', ARGV[4])
elseif sampled and sampled > tonumber(ARGV[1]) then
  redis.call('HDEL', KEYS[3], 'samples', 'sampled')
end
local now = redis.call('TIME')
-- The clock may have stepped back, but revisions must still increase: clients ask for changes after a revision.
local last = tonumber(redis.call('GET', KEYS[4]) or 0)
local revision = string.format('%.0f', math.max(now[1] * 1000000 + now[2], last + 1))
redis.call('SET', KEYS[4], revision)
redis.call('HSET', KEYS[3], 'revision', revision, 'last', ARGV[2], 'held', held)
return revision
"""
