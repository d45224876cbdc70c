"""What Redis runs by itself, as one step."""

COMMIT = """
-- KEYS: the run's hash, then the upload's chunks.
-- ARGV: version, parent ('' for none), record, how many versions to keep, key prefix of the run's chunks.
-- Answers {'stored' | 'refused' | 'expired', head or '', the version's record or ''}.
local run, version = KEYS[1], ARGV[1]
local head = redis.call('HGET', run, 'head') or ''
local record = redis.call('HGET', run, version) or ''
if head ~= ARGV[2] then
  return {'refused', head, record}
end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    return {'expired', head, record}
  end
end
for i = 2, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HSET', run, version, ARGV[3], 'head', version)

local versions = {}
for _, field in ipairs(redis.call('HKEYS', run)) do
  if field ~= 'head' then
    versions[#versions + 1] = field
  end
end
table.sort(versions, function(a, b) return tonumber(a) < tonumber(b) end)
for i = 1, #versions - tonumber(ARGV[4]) do
  local old = cjson.decode(redis.call('HGET', run, versions[i]))
  for chunk = 0, old.chunks - 1 do
    -- Not in KEYS, yet on this node: the prefix carries the run's hash tag.
    redis.call('UNLINK', string.format('%s:%s:%s:%d', ARGV[5], versions[i], old.token, chunk))
  end
  redis.call('HDEL', run, versions[i])
end
return {'stored', version, ARGV[3]}
"""
