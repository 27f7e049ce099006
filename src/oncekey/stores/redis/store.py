"""The store in Redis: every verb is one server-side script per bucket, and one round trip per server for a batch.

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
from oncekey.stores.redis import rows, scripts, urls
from oncekey.stores.redis.buckets import BUCKETS, Names, at_of, by_bucket, name_of
from oncekey.stores.redis.calls import Call, PartlyUnavailable
from oncekey.stores.redis.checks import Probes
from oncekey.stores.redis.epochs import Epochs
from oncekey.stores.redis.in_loop import InLoop
from oncekey.stores.redis.lookups import Lookups
from oncekey.stores.redis.scripts import Script


class RedisStore(Lookups, Epochs, Probes):
    def __init__(self, url: str) -> None:
        self.settings = urls.read(url)
        self.names = Names(self.settings.prefix)
        self._turns = Turns()
        self._open()

    @property
    def capabilities(self) -> Capabilities:
        """``durable`` is False until the servers have said how they write to disk (``epochs.py``)."""
        return Capabilities(durable=self.durable, shared=True, server_clock=True, writers=2)

    # -- verbs of requests ---------------------------------------------------------------------------------------

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        names = [name_of(wanted.scope, wanted.key) for wanted in batch]
        values = [rows.reservation_values(wanted) for wanted in batch]
        found: list[Any] = [None] * len(batch)
        for position, fields, now in self._each(scripts.RESERVE, names, values, confirmed=True):
            wanted = batch[position]
            if fields is None:
                found[position] = Found(rows.inserted(wanted, now))
            else:
                found[position] = Found(rows.record(wanted.scope, wanted.key, fields, now / 1e6))
        return found

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        moved: list[Record | None] = [None] * len(batch)
        ends = [position for position, change in enumerate(batch) if change.ends]
        others = [position for position, change in enumerate(batch) if not change.ends]
        # An undone reservation and a renewed lease may be lost: then the lease ends by itself.
        confirmed = any(change.to_state is not None and change.event is not Event.RENEW for change in batch)
        for script, positions in ((scripts.END, ends), (scripts.SWAP, others)):
            names = [name_of(batch[position].scope, batch[position].key) for position in positions]
            encode = rows.end_values if script is scripts.END else rows.swap_values
            values = [encode(batch[position]) for position in positions]
            for number, answer, now in self._each(script, names, values, confirmed=confirmed):
                change = batch[positions[number]]
                if answer is None:
                    continue
                if script is scripts.END:
                    moved[positions[number]] = rows.ended(change, answer, now / 1e6)
                else:
                    # A deleted row comes with its own response, and a row that starts over has none.
                    kept = change.to_state is None or change.restart is not None
                    response = None if kept else change.response
                    record = rows.record(change.scope, change.key, answer, now / 1e6, response)
                    moved[positions[number]] = record
        return moved

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        found: list[Record | None] = [None] * len(keys)
        names = [name_of(*at) for at in keys]
        for position, fields, now in self._each(scripts.READ, names, None, confirmed=True):
            if fields is not None:
                found[position] = rows.record(*keys[position], fields, now / 1e6)
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

    def _each(
        self, script: Script, names: Sequence[bytes], values: Sequence[Sequence[bytes]] | None, *, confirmed: bool
    ) -> list[tuple[int, Any, int]]:
        """Run a script that takes rows. For each row: its position, its answer, and the server's time."""
        if not names:
            return []
        deadline = time.monotonic() + self.settings.timeout
        first = (self._known_epoch(deadline), b"1" if confirmed and self.settings.replicas else b"0")
        grouped = by_bucket(names)
        calls = []
        for bucket, positions in grouped.items():
            keys = [self.names.epochs[bucket], *(self.names.row(names[position], bucket) for position in positions)]
            given = [value for position in positions for value in values[position]] if values else []
            calls.append(Call(bucket, script, keys, (*first, *given)))
        replies = self._run(calls, deadline, confirmed=confirmed)
        return [
            (position, answer, int(now))
            for positions, (now, *answers) in zip(grouped.values(), replies, strict=True)
            for position, answer in zip(positions, answers, strict=True)
        ]

    def _all(self, script: Script, *values: bytes) -> list[Any]:
        """Run a script in every bucket."""
        return self._in_buckets(script, dict.fromkeys(BUCKETS, values))

    def _in_buckets(self, script: Script, values: dict[int, Sequence[bytes]]) -> list[Any]:
        """Run a script in some buckets, each with its own values; the replies in the same order."""
        deadline = time.monotonic() + self.settings.timeout
        first = (self._known_epoch(deadline), b"0")
        calls = [
            Call(bucket, script, [self.names.epochs[bucket]], (*first, *given)) for bucket, given in values.items()
        ]
        try:
            return self._run(calls, deadline, confirmed=False)
        except PartlyUnavailable as error:  # the answers of some buckets are no answer
            raise StoreUnavailable(str(error)) from error
