"""The store in Redis: every verb is one server-side script, and one round trip per server for a batch.

Owns the verbs of requests. ``lookups.py`` has those of upkeep and operators, ``epochs.py`` says whether the data is
still there, ``calls.py`` has the connections. The .lua files say what the scripts do; ``core/states.py`` says what a
transition means. There is no outbox and no enlisting: Redis has no transaction that an app's rows could share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redis.connection import Connection, SSLConnection

from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Event
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.api import FOUND, Capabilities
from oncekey.stores.duties import Turns
from oncekey.stores.redis import batches, rows, scripts, urls
from oncekey.stores.redis.batches import Call, Way
from oncekey.stores.redis.buckets import BUCKETS, Names, at_of, name_of
from oncekey.stores.redis.calls import PartlyUnavailable
from oncekey.stores.redis.checks import Probes
from oncekey.stores.redis.epochs import Epochs
from oncekey.stores.redis.in_loop import InLoop
from oncekey.stores.redis.kept import RedisKept
from oncekey.stores.redis.lookups import Lookups
from oncekey.stores.redis.scripts import Script


class RedisStore(Lookups, RedisKept, Epochs, Probes):
    def __init__(self, url: str) -> None:
        self.settings = urls.read(url)
        self.names = Names(self.settings.prefix)
        self._turns = Turns()
        self._open()

    @property
    def capabilities(self) -> Capabilities:
        """``durable`` is False until the servers have said how they write to disk (``watch.py``)."""
        return Capabilities(durable=self.calls.watch.durable, shared=True, server_clock=True, writers=2)

    # -- verbs of requests ---------------------------------------------------------------------------------------

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        if not batch:
            return []
        deadline = time.monotonic() + self.settings.timeout
        asked = batches.reserve_calls(self._way(deadline, confirmed=True), batch)
        answers = batches.found(batch, asked, self._run(asked, deadline, confirmed=True))
        return [
            Found(answer if isinstance(answer, Record) else rows.inserted(wanted, answer))
            for wanted, answer in zip(batch, answers, strict=True)
        ]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        moved: list[Record | None] = [None] * len(batch)
        ends = [position for position, change in enumerate(batch) if change.ends]
        others = [position for position, change in enumerate(batch) if not change.ends]
        # An undone reservation and a renewed lease may be lost: then the lease ends by itself.
        confirmed = any(change.to_state is not None and change.event is not Event.RENEW for change in batch)
        for position, now in zip(ends, self._end([batch[position] for position in ends]), strict=True):
            moved[position] = None if now is None else rows.ended(batch[position], now)
        names = [name_of(batch[position].scope, batch[position].key) for position in others]
        values = [rows.swap_values(batch[position]) for position in others]
        for number, answer, now in self._each(scripts.SWAP, names, values, confirmed=confirmed):
            change = batch[others[number]]
            if answer is not None:
                # A deleted row comes with its own response, and a row that starts over has none.
                kept = change.to_state is None or change.restart is not None
                written = None if kept else change.response
                moved[others[number]] = rows.record(change.scope, change.key, answer, now, written)
        return moved

    def _end(self, batch: Sequence[Swap]) -> list[float | None]:
        if not batch:
            return []
        deadline = time.monotonic() + self.settings.timeout
        asked = batches.end_calls(self._way(deadline, confirmed=True), batch)
        return batches.times(len(batch), asked, self._run(asked, deadline, confirmed=True))

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        found: list[Record | None] = [None] * len(keys)
        names = [name_of(*at) for at in keys]
        for position, fields, now in self._each(scripts.READ, names, None, confirmed=True):
            if fields is not None:
                found[position] = rows.record(*keys[position], fields, now)
        return found

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        found: list[list[Step]] = [[] for _ in keys]
        names = [name_of(asked.scope, asked.key) for asked in keys]
        for position, steps, _ in self._each(scripts.STEPS, names, None, confirmed=True):
            found[position] = [rows.step(fields) for fields in steps]
        return found

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        wanted = [(b"d:", downstream_key), (b"p:", provider_id)]
        values = [kind + rows.text(value) for kind, value in wanted if value is not None]
        if not values:
            return []
        found = {at_of(name) for names in self._all(scripts.FIND, b"%d" % FOUND, *values) for name in names}
        return sorted(found)[:FOUND]

    def in_loop(self) -> InLoop | None:
        """None with TLS: an event loop cannot take over a connection that a thread has opened."""
        if issubclass(self.settings.options.get("connection_class", Connection), SSLConnection):
            return None
        return InLoop(self)

    # -- connections ---------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        self.calls.disconnect()

    def close(self) -> None:
        self.calls.close()

    # -- scripts -------------------------------------------------------------------------------------------------

    def way(self, *, confirmed: bool) -> Way:
        """How calls reach this Redis, if a verb has learned it; without asking a server."""
        beat = b"1" if confirmed and self.settings.replicas else b"0"
        return Way(self.names, *self.learned(), beat)

    def _way(self, deadline: float, *, confirmed: bool) -> Way:
        self._learn(deadline)
        return self.way(confirmed=confirmed)

    def _each(
        self, script: Script, names: Sequence[bytes], values: Sequence[Sequence[bytes]] | None, *, confirmed: bool
    ) -> list[tuple[int, Any, float]]:
        """Run a script that takes rows. For each row: its position, its answer, and the server's time."""
        if not names:
            return []

        def chosen(positions: Sequence[int]) -> list[bytes]:
            return [value for position in positions for value in values[position]] if values else []

        deadline = time.monotonic() + self.settings.timeout
        asked = batches.calls(self._way(deadline, confirmed=confirmed), script, names, chosen)
        replies = self._run(asked, deadline, confirmed=confirmed)
        return [
            (position, answer, int(now) / 1e6)
            for call, (now, *answers) in zip(asked, replies, strict=True)
            for position, answer in zip(call.positions, answers, strict=True)
        ]

    def _all(self, script: Script, *values: bytes) -> list[Any]:
        """Run a script in every bucket."""
        return self._in_buckets(script, dict.fromkeys(BUCKETS, values))

    def _in_buckets(self, script: Script, values: dict[int, Sequence[bytes]]) -> list[Any]:
        """Run a script in some buckets, each with its own values; the replies in the same order."""
        deadline = time.monotonic() + self.settings.timeout
        self._learn(deadline)
        epoch, _ = self.learned()
        calls = [
            Call(bucket, script, [self.names.epochs[bucket]], (epoch, b"1", b"0", *given), ())
            for bucket, given in values.items()
        ]
        try:
            return self._run(calls, deadline, confirmed=False)
        except PartlyUnavailable as error:  # the answers of some buckets are no answer
            raise StoreUnavailable(str(error)) from error
