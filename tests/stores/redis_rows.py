"""What tests do to rows in Redis from outside of the store."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from oncekey.stores.redis.buckets import Names, bucket_of, name_of

_AGE = """
local name, micros = ARGV[1], ARGV[2]
local row = KEYS[1] .. 'k:' .. name
if redis.call('EXISTS', row) == 0 then return end
for _, field in ipairs({'lease', 'ask', 'born', 'done', 'expires'}) do
  if redis.call('HEXISTS', row, field) == 1 then redis.call('HINCRBY', row, field, micros) end
end
for _, pattern in ipairs({'shelf:*', 'ask:*', 'resumable'}) do
  for _, set in ipairs(redis.call('KEYS', KEYS[1] .. pattern)) do
    if redis.call('ZSCORE', set, name) then redis.call('ZINCRBY', set, micros, name) end
  end
end
"""


def age(client: redis.Redis, keys: Iterable[tuple[str, str]], seconds: float) -> None:
    """Move all times of these rows back."""
    bases = Names("oncekey").bases
    with client.pipeline(transaction=False) as together:
        for at in keys:
            name = name_of(*at)
            together.eval(_AGE, 1, bases[bucket_of(name)], name, -round(seconds * 1e6))
        together.execute()
