"""Lua scripts, each of which Redis runs atomically.

Keys of chunks are not in KEYS, but are on the same node: their prefix contains the tenant's hash tag.
"""

_WHOLE = """
local function whole(text)
  return type(text) == 'string' and string.match(text, '^%d+$') and tonumber(text)
end
"""
"""Parses a whole number; a damaged value counts as absent."""

_ANEW = """
local function damaged(key, kind)
  local found = redis.call('TYPE', key).ok
  return found ~= kind and found ~= 'none'
end
local function begin_anew(key, kind)
  if damaged(key, kind) then
    redis.call('DEL', key)
  end
end
"""
"""Deletes a key that has a value of another type, which nothing could read, before a script writes to it."""

_FORGET = (
    _WHOLE
    + _ANEW
    + """
local function count(key, change)
  redis.call('SET', key, string.format('%.0f', math.max(0, (whole(redis.pcall('GET', key)) or 0) + change)))
end
local function read(run, version)
  local readable, record = pcall(cjson.decode, redis.call('HGET', run, version))
  -- A damaged record may contain anything: a billion chunks would block Redis for minutes.
  if readable and type(record) == 'table' and type(record.info) == 'table' and type(record.info.size) == 'number'
    and type(record.chunks) == 'number' and record.chunks <= 65536 and type(record.token) == 'string' then
    return record
  end
  return {info = {size = 0}, chunks = 0, token = ''}
end
local function forget(run, pins, blobs, version)
  local record = read(run, version)
  for chunk = 0, record.chunks - 1 do
    redis.call('UNLINK', string.format('%s:%s:%s:%d', blobs, version, record.token, chunk))
  end
  redis.call('HDEL', run, version)
  redis.call('SREM', pins, version)
  return record.info.size
end
"""
)

COMMIT = (
    _FORGET
    + """
-- KEYS: the run's hash, its pins, the tenant's runs, the tenant's bytes, then the upload's chunks.
-- ARGV: version, parent ('' for none), record, bytes, versions to keep, quota ('' for none), run, prefix of chunks.
-- Answers {'stored' | 'refused' | 'expired' | 'quota', head or bytes or '', the version's record or ''}.
-- A damaged list of runs begins anew, too, and each run comes back to it with its next version.
begin_anew(KEYS[1], 'hash')
begin_anew(KEYS[2], 'set')
begin_anew(KEYS[3], 'set')
local run, pins, version = KEYS[1], KEYS[2], ARGV[1]
local head = redis.call('HGET', run, 'head') or ''
local record = redis.call('HGET', run, version) or ''
if record == ARGV[3] then
  -- This same upload, by its token: it was committed, but the answer was lost. Written again so that WAITAOF waits.
  redis.call('HSET', run, version, record)
  return {'stored', version, record}
end
if head ~= ARGV[2] then
  return {'refused', head, record}
end
for i = 5, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    return {'expired', head, record}
  end
end

local versions = {version}
for _, field in ipairs(redis.call('HKEYS', run)) do
  if tonumber(field) and redis.call('SISMEMBER', pins, field) == 0 then
    versions[#versions + 1] = field
  end
end
table.sort(versions, function(a, b) return tonumber(a) < tonumber(b) end)
local old, held = #versions - tonumber(ARGV[5]), (whole(redis.pcall('GET', KEYS[4])) or 0) + tonumber(ARGV[4])
for i = 1, old do
  held = held - read(run, versions[i]).info.size
end
if ARGV[6] ~= '' and held > tonumber(ARGV[6]) then
  return {'quota', held, record}
end

redis.call('SADD', KEYS[3], ARGV[7])
for i = 5, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HSET', run, version, ARGV[3], 'head', version)
local change = tonumber(ARGV[4])
for i = 1, old do
  change = change - forget(run, pins, ARGV[8], versions[i])
end
count(KEYS[4], change)
return {'stored', version, ARGV[3]}
"""
)

AGAIN = """
-- KEYS: the run's hash. ARGV: version, its record. Writes it again unchanged, unless it is gone, so that WAITAOF waits.
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
"""

REWIND = (
    _FORGET
    + """
-- KEYS: the run's hash, its pins, the tenant's bytes. ARGV: version, the head that it replaces, prefix of chunks.
-- Answers the new head; the unchanged head if it is neither of the two; '' if the version does not exist.
begin_anew(KEYS[1], 'hash')
begin_anew(KEYS[2], 'set')
local head = redis.call('HGET', KEYS[1], 'head')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return ''
end
if head ~= ARGV[1] and head ~= ARGV[2] then
  return head
end
local size = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if tonumber(field) and tonumber(field) > tonumber(ARGV[1]) then
    size = size + forget(KEYS[1], KEYS[2], ARGV[3], field)
  end
end
-- Also if it is the head already: WAITAOF waits for the writes of its own connection.
redis.call('HSET', KEYS[1], 'head', ARGV[1])
count(KEYS[3], -size)
return ARGV[1]
"""
)

DELETE = (
    _FORGET
    + """
-- KEYS: the run's hash, its pins, the tenant's runs, the tenant's bytes, the run's iterations, progress, activity.
-- ARGV: run, prefix of chunks. Answers whether there was the run.
-- A damaged run can be deleted, too, regardless of its keys' contents.
local deleted, size = redis.call('EXISTS', KEYS[1]), 0
redis.call('DEL', KEYS[2])
for _, field in ipairs(redis.pcall('HKEYS', KEYS[1])) do
  if field ~= 'head' then
    size = size + forget(KEYS[1], KEYS[2], ARGV[2], field)
  end
end
redis.call('UNLINK', KEYS[1], KEYS[5], KEYS[6], KEYS[7])
redis.pcall('SREM', KEYS[3], ARGV[1])
count(KEYS[4], -size)
return deleted
"""
)

SWEEP = (
    _FORGET
    + """
-- KEYS: the run's hash, the tenant's bytes, then chunks of the run. Deletes the chunks, except those of uploads, while
-- the hash has a value of another type: their records are lost. Answers whether it has.
if not damaged(KEYS[1], 'hash') then
  return 0
end
local size = 0
for i = 3, #KEYS do
  if redis.call('PTTL', KEYS[i]) == -1 then
    local bytes = redis.pcall('STRLEN', KEYS[i])
    size = size + (type(bytes) == 'number' and bytes or 0)
    redis.call('UNLINK', KEYS[i])
  end
end
count(KEYS[2], -size)
return 1
"""
)

PIN = (
    _ANEW
    + """
-- KEYS: the run's hash, its pins. ARGV: version, '1' to pin. Answers whether the version exists.
begin_anew(KEYS[1], 'hash')
begin_anew(KEYS[2], 'set')
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call(ARGV[2] == '1' and 'SADD' or 'SREM', KEYS[2], ARGV[1])
return 1
"""
)

TELL = (
    _WHOLE
    + _ANEW
    + """
-- KEYS: the run's hash, its iterations, its progress, the tenant's newest revision.
-- ARGV: iteration, its point, samples ('' for none), the samples' iteration, points to keep, bytes of them to keep.
-- Answers the revision, or '' if there is no such run.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return ''
end
begin_anew(KEYS[2], 'zset')
begin_anew(KEYS[3], 'hash')
local function size(points)
  local sum = 0
  for _, point in ipairs(points) do
    sum = sum + #point
  end
  return sum
end
local held = whole(redis.call('HGET', KEYS[3], 'held')) or size(redis.call('ZRANGE', KEYS[2], 0, -1))
held = held - size(redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[1], '+inf')) + #ARGV[2]
redis.call('ZREMRANGEBYSCORE', KEYS[2], ARGV[1], '+inf')
redis.call('ZADD', KEYS[2], ARGV[1], ARGV[2])
local count = redis.call('ZCARD', KEYS[2])
while count > 1 and (count > tonumber(ARGV[5]) or held > tonumber(ARGV[6])) do
  held = held - #redis.call('ZPOPMIN', KEYS[2])[1]
  count = count - 1
end
local sampled = redis.call('HGET', KEYS[3], 'sampled')
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[3], 'samples', ARGV[3], 'sampled', ARGV[4])
elseif sampled and (whole(sampled) or math.huge) > tonumber(ARGV[1]) then
  redis.call('HDEL', KEYS[3], 'samples', 'sampled')
end
local now = redis.call('TIME')
-- The clock may have stepped back, but revisions must still increase: clients ask for changes after a revision.
local last = math.max(
  whole(redis.pcall('GET', KEYS[4])) or 0, whole(redis.call('HGET', KEYS[3], 'revision')) or 0
)
local revision = string.format('%.0f', math.max(now[1] * 1000000 + now[2], last + 1))
redis.call('SET', KEYS[4], revision)
redis.call('HSET', KEYS[3], 'revision', revision, 'last', ARGV[2], 'held', held)
return revision
"""
)
