"""The cache in front of another store (``OnceKey(url, cache="redis://…")``): GET and SET, in redis-py.

It needs none of the store's guarantees: it may evict and forget what it likes, and may be empty at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis import asyncio as redis_asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from oncekey.errors import ConfigurationError
from oncekey.stores.cache.client import CacheDown
from oncekey.stores.redis import urls
from oncekey.stores.url_files import require_files
from oncekey.telemetry.redaction import describe

TIMEOUT = 0.05
"""How many seconds a request waits for the cache. A store answers in a few milliseconds, so more would not pay."""
_OURS = urls.SET_HERE | {"decode_responses", "encoding", "encoding_errors"}
"""Options of redis-py that would win over ours. Entries are bytes, and ``timeout`` bounds every wait."""


class RedisCache:
    """Entries in one Redis server."""

    def __init__(self, url: str) -> None:
        self._url, self._timeout = _read(url)
        self._client = self._made()

    def _made(self) -> redis.Redis:
        """redis-py looks at the URL's options when it first connects, which would be in the middle of a request."""
        try:
            client = redis.Redis.from_url(
                self._url,
                socket_timeout=self._timeout,
                socket_connect_timeout=self._timeout,
                retry=Retry(NoBackoff(), 0),
            )
            client.connection_pool.make_connection()  # it connects later
        except TypeError as error:
            raise ConfigurationError(
                f"OnceKey(cache=…): the URL has an option that no cache takes: {error}. It takes timeout and the "
                "options of redis-py's connections, such as ssl_ca_certs with rediss://"
            ) from None
        except (ValueError, RedisError) as error:  # their texts may quote a part of the password
            given = ", ".join(dict(parse_qsl(urlsplit(self._url).query))) or "host, port and login"
            raise ConfigurationError(
                f"OnceKey(cache=…): redis-py cannot read the URL ({type(error).__name__}): correct one of {given}"
            ) from None
        return client

    def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        try:
            found: Any = self._client.mget(names)
        except (RedisError, OSError) as error:
            raise CacheDown(describe(error)) from error
        return list(found)

    def add(self, entries: Mapping[bytes, bytes], seconds: Mapping[bytes, float]) -> None:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for name, entry in entries.items():
                    pipeline.set(name, entry, px=max(1, int(seconds[name] * 1000)), nx=True)
                answers = pipeline.execute(raise_on_error=False)  # raised, an error would quote the command's bytes
        except (RedisError, OSError) as error:
            raise CacheDown(describe(error)) from error
        for answer in answers:
            if isinstance(answer, RedisError):
                raise CacheDown(describe(answer))

    def replace(self, name: bytes, mark: bytes, seconds: float) -> None:
        try:
            self._client.set(name, mark, px=max(1, int(seconds * 1000)))
        except (RedisError, OSError) as error:
            raise CacheDown(describe(error)) from error

    def in_loop(self) -> InLoopRedisCache:
        return InLoopRedisCache(self._url, self._timeout)

    def close(self) -> None:
        self._client.close()


class InLoopRedisCache:
    """Reads in one event loop, on a connection of its own."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._client: redis_asyncio.Redis | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            self._client = redis_asyncio.Redis.from_url(
                self._url,
                single_connection_client=True,
                socket_connect_timeout=self._timeout,
                retry=AsyncRetry(NoBackoff(), 0),
            )
        try:
            async with asyncio.timeout(self._timeout):  # one timer for connect, send and answer
                found: Any = await self._client.mget(names)
        except (RedisError, OSError, TimeoutError) as error:
            self.abandon()  # an answer that comes late must not be read as that of the next question
            raise CacheDown(describe(error)) from error
        return list(found)

    def abandon(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is not None and not self._loop.is_closed():
            loop = self._loop
            loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))


def _read(url: str) -> tuple[str, float]:
    """The URL for redis-py, and our own option ``timeout``."""
    parts = urlsplit(url)
    if "+" in parts.scheme:
        raise ConfigurationError(
            "OnceKey(cache=…): it takes one server, redis://host:6379/0; a cluster or Sentinel is not needed, because "
            "a cache may be empty or down at any time"
        )
    options = dict(parse_qsl(parts.query))
    if sentence := urls.sets_itself(options, _OURS):
        raise ConfigurationError(f"OnceKey(cache=…): {sentence}")
    require_files(options, urls.FILES)
    given = options.pop("timeout", str(TIMEOUT))
    try:
        timeout = float(given)
    except ValueError:
        timeout = 0.0
    if timeout <= 0:
        raise ConfigurationError(f"cache=…?timeout={given}: it takes seconds, such as 0.05")
    return urlunsplit(parts._replace(query=urlencode(options))), timeout
