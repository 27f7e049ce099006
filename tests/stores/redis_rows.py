"""What tests do to rows in Redis from outside of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import redis

from oncekey.stores.redis.buckets import Names, bucket_of, name_of

_AGE = """
local name, micros = ARGV[1], ARGV[2]
local row = KEYS[1] .. 'k:' .. name
local live = redis.call('HGET', row, 'live')
if not live then return end
local values = cjson.decode('[' .. live .. ']')
for _, place in ipairs({6, 7, 10, 11, 13}) do -- lease, born, ask, done, expires
  if values[place] ~= cjson.null then values[place] = values[place] + micros end
end
local texts = {}
for place, value in ipairs(values) do
  texts[place] = type(value) == 'number' and string.format('%.0f', value) or cjson.encode(value)
end
redis.call('HSET', row, 'live', table.concat(texts, ','))
for _, pattern in ipairs({'shelf:*', 'ask:*', 'resumable'}) do
  for _, set in ipairs(redis.call('KEYS', KEYS[1] .. pattern)) do
    if redis.call('ZSCORE', set, name) then redis.call('ZINCRBY', set, micros, name) end
  end
end
"""
_BASES = Names("oncekey").bases
_FIXED = ("fingerprint", "operation", "fingerprint_version", "fingerprint_recipe", "quarantine_seconds")


def age(where: str | redis.Redis, keys: Iterable[tuple[str, str]], seconds: float) -> None:
    """Move all times of these rows back."""
    if isinstance(where, str):
        with redis.Redis.from_url(where) as client:
            return age(client, keys, seconds)
    with where.pipeline(transaction=False) as together:
        for at in keys:
            name = name_of(*at)
            together.eval(_AGE, 1, _BASES[bucket_of(name)], name, -round(seconds * 1e6))
        together.execute()
    return None


def change(url: str, scope: str, key: str, columns: Mapping[str, Any]) -> None:
    """Write into the part of a row that never changes, as another version would have."""
    name = name_of(scope, key)
    row = _BASES[bucket_of(name)] + b"k:" + name
    with redis.Redis.from_url(url) as client:
        found = orjson.loads(b"[" + client.hget(row, "fixed") + b"]")
        fixed = dict(zip(_FIXED, found, strict=True))
        fixed |= {column: value.hex() if isinstance(value, bytes) else value for column, value in columns.items()}
        client.hset(row, "fixed", orjson.dumps(list(fixed.values()))[1:-1])


def count(url: str) -> int:
    """How many keys there are."""
    with redis.Redis.from_url(url) as client:
        return len(client.keys("oncekey:*:k:*"))
