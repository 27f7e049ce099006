"""Redis Streams, with redis-py (``redis.asyncio``). ::

    client = redis.asyncio.Redis()
    await RedisStreamConsumer(once, client, "payments", "billing", charge, dead_letter="payments:dead").run()

The id is the field ``message-id`` of the entry, which the producer sets. ``message_id=position`` takes the entry's own
id instead: then a message that its producer added twice counts as two.

An entry that is not acknowledged stays in the group's pending list. ``run`` claims what has been idle there for longer
than ``idle``: entries of consumers that died, and entries that are to be delivered again later. While a handler runs,
its entry is not idle.
"""

from __future__ import annotations

import inspect
import os
import socket
from datetime import timedelta
from typing import Any, Final, NamedTuple

import orjson
from redis.exceptions import ResponseError

from oncekey.consumers.consumer import is_text
from oncekey.consumers.event_loop import AsyncConsumer, Handler
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

ID_FIELD: Final = b"message-id"
_BEGINNING: Final = "0-0"
_OURS: Final = b"oncekey-"
_BLOCK_MILLISECONDS: Final = 1_000


class Entry(NamedTuple):
    """One entry of a stream: what the handler gets."""

    id: str
    fields: dict[bytes, bytes]
    """The names and values, as bytes, whatever ``decode_responses`` says."""

    def __getitem__(self, name: Any) -> Any:
        """``entry["amount"]``: the value of a field, as bytes."""
        return self.fields[name.encode() if isinstance(name, str) else name]


def position(raw: Entry) -> str:
    """The id that Redis gave the entry: the same at every delivery, and new if its producer adds it again."""
    return raw.id


class RedisStreamConsumer(AsyncConsumer[Entry]):
    """Consumes one stream for one group. ``settings`` are those of :class:`oncekey.consumers.Consumer`.

    ``name``: the consumer's name in the group; by default the host and the process id. ``idle``: after this time
    without an acknowledgement an entry is delivered again.
    """

    extends = True
    id_hint = (
        "Add the field when you write: XADD stream * message-id ID …; or pass message_id=position, of "
        "oncekey.consumers.redis_streams"
    )

    def __init__(
        self,
        once: OnceKey,
        client: Any,
        stream: str,
        group: str,
        handler: Handler[Entry],
        *,
        name: str | None = None,
        idle: timedelta = timedelta(seconds=60),
        **settings: Any,
    ) -> None:
        super().__init__(once, handler, **settings)
        if not inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
            raise ConfigurationError(
                "RedisStreamConsumer(client=…): it takes an async client, such as redis.asyncio.Redis.from_url(url)"
            )
        if not isinstance(idle, timedelta) or idle < timedelta(milliseconds=1):  # type: ignore[redundant-expr]
            raise ConfigurationError(
                f"RedisStreamConsumer(idle={idle!r}): it takes a timedelta of a millisecond or more, such as "
                "timedelta(seconds=60)"
            )
        if not (is_text(stream) and is_text(group)):
            raise ConfigurationError("RedisStreamConsumer(stream, group): both are names: 'payments', 'billing'")
        self.client = client
        self.stream = stream
        self.group = group
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._idle = int(idle.total_seconds() * 1000)
        self._next = _BEGINNING

    async def consume(self) -> None:
        """Consume until cancelled. Creates the group at the beginning of the stream, if it does not exist."""
        try:
            await self.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        try:
            while self._goes_on():
                free = await self._free()
                claimed = await self._claimed(free)
                seen_all = self._next == _BEGINNING
                new = await self._new(free - len(claimed), wait=seen_all and not claimed)
                for raw in [*claimed, *new]:
                    await self._spawn(raw)
        finally:
            await self._drain()

    async def _claimed(self, count: int) -> list[Entry]:
        """Entries that were idle for long. Redis looks at some of the pending ones, and says where to go on."""
        found = await self.client.xautoclaim(
            self.stream, self.group, self.name, min_idle_time=self._idle, start_id=self._next, count=count
        )
        self._next = _text(found[0])
        return [_entry(*each) for each in found[1] if each[0] is not None]

    async def _new(self, count: int, *, wait: bool) -> list[Entry]:
        if count < 1:
            return []
        block = min(_BLOCK_MILLISECONDS, self._idle) if wait else None
        found = await self.client.xreadgroup(self.group, self.name, {self.stream: ">"}, count=count, block=block)
        streams = found.items() if isinstance(found, dict) else found or []
        return [_entry(*each) for _, entries in streams for each in _flat(entries)]

    def queue_of(self, raw: Entry) -> str:
        del raw
        return f"{self.stream}/{self.group}"

    def id_of(self, raw: Entry) -> object:
        return raw.fields.get(ID_FIELD)

    def header_of(self, raw: Entry, name: str) -> str | None:
        found = raw.fields.get(name.encode())
        return None if found is None else found.decode("utf-8", "replace")

    def body_of(self, raw: Entry) -> bytes:
        """All fields, in the order of their names, without those that a copy has got from us."""
        own = sorted(name for name in raw.fields if not name.startswith(_OURS))
        return orjson.dumps([[name.decode("latin-1"), raw.fields[name].decode("latin-1")] for name in own])

    async def ack(self, raw: Entry) -> None:
        await self.client.xack(self.stream, self.group, raw.id)

    async def retry(self, raw: Entry, delay: float) -> None:
        """It stays in the pending list. Its idle time is set so that it is claimed after ``delay``."""
        await self._set_idle(raw, max(0, self._idle - int(delay * 1000)))

    async def extend_every(self) -> float:
        return self._idle / 3000

    async def extend(self, raw: Entry) -> None:
        """While its handler runs, or it is kept, no other consumer claims it."""
        await self._set_idle(raw, 0)

    async def _set_idle(self, raw: Entry, idle: int) -> None:
        await self.client.xclaim(
            self.stream, self.group, self.name, min_idle_time=0, message_ids=[raw.id], idle=idle, justid=True
        )

    async def copy(self, raw: Entry, place: str, headers: dict[str, str]) -> None:
        own: dict[Any, Any] = {**raw.fields, **{name.encode(): text.encode() for name, text in headers.items()}}
        await self.client.xadd(place, own)


def _flat(entries: Any) -> Any:
    """redis-py answers in RESP3 with one list more than in RESP2."""
    if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], list | tuple):
        return entries[0]
    return entries


def _entry(entry_id: Any, fields: Any) -> Entry:
    return Entry(_text(entry_id), {_bytes(name): _bytes(text) for name, text in (fields or {}).items()})


def _text(given: Any) -> str:
    return given.decode() if isinstance(given, bytes) else str(given)


def _bytes(given: Any) -> bytes:
    return given if isinstance(given, bytes) else str(given).encode()


__all__ = ["Entry", "RedisStreamConsumer", "position"]
