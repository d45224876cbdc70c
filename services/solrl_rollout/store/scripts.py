"""Lua scripts. Redis runs each script atomically.

Keys that a script composes are on the node of its KEYS: their prefix contains the tenant's hash tag. None takes longer
than one run's versions and the tenant's number of runs require, since Redis serves nobody else while a script runs.
"""

_VERSIONS = """
local function versions_of(run)
  local found = {}
  for _, field in ipairs(redis.call('HKEYS', run)) do
    if #field <= 16 and string.find(field, '^%d+$') then
      found[#found + 1] = field
    end
  end
  return found
end
"""

_SIZES = """
local function bytes_of(run, blobs)
  local bytes = 0
  for _, version in ipairs(versions_of(run)) do
    bytes = bytes + redis.call('STRLEN', blobs .. ':' .. version)
  end
  return bytes
end
"""

_FORGET = """
local function forget(run, blobs, version)
  redis.call('UNLINK', blobs .. ':' .. version)
  redis.call('HDEL', run, version)
end
"""

COMMIT = (
    _VERSIONS
    + _SIZES
    + _FORGET
    + """
-- KEYS: the run's hash, the tenant's runs, their bytes, the uploaded bytes.
-- ARGV: version, parent ('' for none), record, versions to keep, quota ('' for none), run, prefix of the run's blobs.
-- Answers {'stored'}, {'refused', head or '', the version's record or ''}, {'quota', bytes with this version}, or
-- {'lost'} if the uploaded bytes are gone. Unless it is stored, the upload is removed.
local run, version, upload = KEYS[1], ARGV[1], KEYS[4]
local head = redis.call('HGET', run, 'head') or ''
local record = redis.call('HGET', run, version) or ''
if record ~= '' or head ~= ARGV[2] or (head ~= '' and tonumber(version) <= tonumber(head)) then
  redis.call('UNLINK', upload)
  return {'refused', head, record}
end
if redis.call('EXISTS', upload) == 0 then
  return {'lost'}
end

local versions = versions_of(run)
versions[#versions + 1] = version
table.sort(versions, function(a, b) return tonumber(a) < tonumber(b) end)
local old = #versions - tonumber(ARGV[4])

local sizes, held = redis.call('HGETALL', KEYS[3]), bytes_of(run, ARGV[7]) + redis.call('STRLEN', upload)
for i = 1, old do
  held = held - redis.call('STRLEN', ARGV[7] .. ':' .. versions[i])
end
if ARGV[5] ~= '' then
  local total = held
  for i = 1, #sizes, 2 do
    if sizes[i] ~= ARGV[6] then
      total = total + (tonumber(sizes[i + 1]) or 0)
    end
  end
  if total > tonumber(ARGV[5]) then
    redis.call('UNLINK', upload)
    return {'quota', total}
  end
end

redis.call('RENAME', upload, ARGV[7] .. ':' .. version)
redis.call('PERSIST', ARGV[7] .. ':' .. version)
redis.call('HSET', run, version, ARGV[3], 'head', version)
redis.call('SADD', KEYS[2], ARGV[6])
redis.call('HSET', KEYS[3], ARGV[6], string.format('%.0f', held))
for i = 1, old do
  forget(run, ARGV[7], versions[i])
end
return {'stored'}
"""
)

REWIND = (
    _VERSIONS
    + _SIZES
    + _FORGET
    + """
-- KEYS: the run's hash, the tenant's bytes. ARGV: version, the head that it replaces, prefix of blobs, run.
-- Answers the new head; the unchanged head if it is neither of the two; '' if the version does not exist.
local head = redis.call('HGET', KEYS[1], 'head')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return ''
end
if head ~= ARGV[1] and head ~= ARGV[2] then
  return head
end
for _, field in ipairs(versions_of(KEYS[1])) do
  if tonumber(field) > tonumber(ARGV[1]) then
    forget(KEYS[1], ARGV[3], field)
  end
end
redis.call('HSET', KEYS[1], 'head', ARGV[1])
redis.call('HSET', KEYS[2], ARGV[4], string.format('%.0f', bytes_of(KEYS[1], ARGV[3])))
return ARGV[1]
"""
)

DELETE = (
    _VERSIONS
    + """
-- KEYS: the tenant's runs, their bytes, then all keys of the run but its blobs, first its hash.
-- ARGV: run, prefix of blobs. Answers whether there was the run.
for _, version in ipairs(versions_of(KEYS[3])) do
  redis.call('UNLINK', ARGV[2] .. ':' .. version)
end
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local deleted = redis.call('EXISTS', KEYS[3])
redis.call('UNLINK', unpack(KEYS, 3))
return deleted
"""
)

PROBE = """
-- KEYS: a key that does not exist. Fails where Redis runs no scripts or takes no writes, but not where it is full.
return redis.call('UNLINK', KEYS[1])
"""

REPORT = """
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
local last = redis.pcall('GET', KEYS[4])
last = type(last) == 'string' and string.find(last, '^%d+$') and tonumber(last) or 0
if last >= 2 ^ 53 then
  last = 0
end
local revision = string.format('%.0f', math.max(now[1] * 1000000 + now[2], last + 1))
redis.call('SET', KEYS[4], revision)
redis.call('HSET', KEYS[3], 'revision', revision, 'last', ARGV[2], 'held', held)
return revision
"""
