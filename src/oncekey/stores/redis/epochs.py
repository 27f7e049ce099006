"""Whether the data is still there: every bucket has an epoch, and every script compares it before it does anything.

A Redis that comes back empty, or an empty one in its place, would make every key look new, and every retry would run a
second time. Such a Redis has no epoch, or another one, so requests get 503 (fail closed). oncekey writes an epoch only
when an operator says so: ``oncekey migrate --init`` for a new Redis, ``oncekey migrate --accept-loss`` after a loss. An
epoch tells that a bucket was emptied. It cannot tell that the last writes are missing (docs/stores.md).

An epoch is the version of the layout, a dash and a random number. A process learns it at the first use and keeps it
until it ends; ``?epoch=`` in the URL fixes it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.audit import Audit
from oncekey.errors import OnceKeyError, SchemaError, StoreUnavailable
from oncekey.stores.redis import scripts
from oncekey.stores.redis.buckets import BUCKETS, Names, bucket_of, name_of
from oncekey.stores.redis.calls import Call, Calls
from oncekey.stores.redis.connection import Link
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.redis.servers import ASKED, Server, evicts

if TYPE_CHECKING:
    from oncekey.stores.redis.urls import Settings

LAYOUT = "1"
EPOCH_NAME = ("", "oncekey:epoch")
"""Under this scope and key the audit has the losses that an operator accepted. No request can have an empty scope."""
_RACE_SECONDS = 2.0
"""How long a second ``--init`` waits for a first one that is half done."""


NOT_DURABLE = (
    "%s may lose what it has confirmed: if it dies, it comes back with older data, and retries of the keys that are "
    "missing run again. Its epoch cannot tell. Set appendonly yes and appendfsync always, or keep keys of payments in "
    "a database; `oncekey doctor` and docs/stores.md say more"
)
"""Logged once, when a store first looks at a Redis that writes to disk late or never."""

_log = logging.getLogger("oncekey")


class _CheckedCalls(Calls):
    """Connections only to servers that evict nothing, and refusals about epochs in words."""

    def check_server(self, link: Link, deadline: float) -> None:
        server = Server.of(link.address, link.ask(ASKED, deadline))
        if sentence := evicts(server, self.where):
            raise SchemaError(sentence)

    def refused(self, refusal: Refusal) -> OnceKeyError:
        if refusal.code != "ONCEKEY-EPOCH":
            return super().refused(refusal)
        if refusal.rest:
            return SchemaError(
                f"{self.where} has another epoch ({refusal.rest}) than this process knows: it was emptied and set up "
                "again, or it is another Redis. Requests are refused, because lost keys would look new. If this is "
                "right, restart the app, with that epoch if its URL has one"
            )
        return SchemaError(lost_sentence(self.where))


def lost_sentence(where: str) -> str:
    return (
        f"{where} has lost keys: a bucket has no epoch. Requests are refused, because lost keys would look new. "
        "Restore its data, or accept the loss with `oncekey migrate --accept-loss` and restart the app"
    )


class Epochs:
    """Part of ``RedisStore``."""

    durable = False
    _warned = False
    """Whether every server writes each command to disk before it answers; known after a check."""

    if TYPE_CHECKING:
        settings: Settings
        names: Names

    def _open(self) -> None:
        self.calls: Calls = _CheckedCalls(self.settings)
        self._epoch = self.settings.epoch.encode() if self.settings.epoch else None

    def _run(self, calls: Sequence[Call], deadline: float, *, confirmed: bool) -> list[Any]:
        return self.calls.run(calls, deadline, confirmed=confirmed)

    def _known_epoch(self, deadline: float) -> bytes:
        if self._epoch is None:
            self._look(deadline)
        if self._epoch is None:
            raise SchemaError(lost_sentence(self.calls.where))
        return self._epoch

    def epoch_in_use(self) -> bytes:
        """The epoch, if a verb has learned it; without asking a server."""
        if self._epoch is None:
            raise StoreUnavailable("the epoch is not known yet")
        return self._epoch

    # -- the Keys protocol ---------------------------------------------------------------------------------------

    def migrate(self) -> list[str]:
        """There is one layout so far, so nothing ever runs. It never writes an epoch that is missing."""
        self.check()
        return []

    def check(self) -> None:
        self._look(self._deadline())

    # -- for operators -------------------------------------------------------------------------------------------

    def init(self) -> str:
        """Write the epoch of a Redis that has none, and return it. Safe to run twice, and in two processes at once.

        SchemaError if anything shows that this Redis is not new: then it has lost keys.
        """
        deadline = self._deadline()
        until = time.monotonic() + _RACE_SECONDS
        if not any(self._marks(deadline)):
            self._refuse_if_used_before(deadline)
            # The first bucket decides between two that run at once.
            self._mark(BUCKETS[:1], f"{LAYOUT}-{secrets.token_hex(8)}".encode(), deadline)
            (first,) = self.calls.ask_of([(0, (b"GET", self.names.epochs[0]))], deadline)
            self._mark(BUCKETS[1:], first, deadline)
        while None in self._marks(deadline) and time.monotonic() < until:
            time.sleep(0.05)
        return self._look(deadline)

    def _refuse_if_used_before(self, deadline: float) -> None:
        """Raise SchemaError if the URL names an epoch, or keys or audits of oncekey are there without one."""
        left = [(bucket, (b"EXISTS", *self.names.kept(bucket))) for bucket in BUCKETS]
        if self.settings.epoch is not None:
            found = f"has no epoch, and the URL names one ({self.settings.epoch})"
            new = "; if it is a new one, take epoch= out of the URL"
        elif any(self.calls.ask_of(left, deadline)):
            found, new = "has keys of oncekey, and no epoch", ""
        else:
            return
        raise SchemaError(
            f"{self.calls.where} {found}: it has lost keys. --init would make them look new, and their retries would "
            f"run again. Restore its data, or accept the loss with `oncekey migrate --accept-loss`{new}"
        )

    def accept_loss(self, audit: Audit) -> str:
        """Give all buckets a new epoch, and write into the audit which operator accepted the loss, and of what."""
        deadline = self._deadline()
        marks = self._marks(deadline)
        known = sorted({mark.decode() for mark in marks if mark is not None})
        epoch = f"{LAYOUT}-{secrets.token_hex(8)}".encode()
        self.calls.ask_of([(bucket, (b"SET", self.names.epochs[bucket], epoch)) for bucket in BUCKETS], deadline)
        self._epoch = epoch
        lost = sum(mark is None for mark in marks)
        words = (
            audit.who,
            "accept_loss",
            ", ".join(known) or "none",
            epoch.decode(),
            f"{lost} of 16 buckets: {audit.why}",
        )
        name = name_of(*EPOCH_NAME)
        call = Call(
            bucket_of(name),
            scripts.NOTE,
            [self.names.epochs[bucket_of(name)]],
            (epoch, b"0", name, orjson.dumps(words)),
        )
        self._run([call], deadline, confirmed=False)
        return self._look(deadline)

    # -- epochs --------------------------------------------------------------------------------------------------

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.timeout

    def _marks(self, deadline: float) -> list[bytes | None]:
        """The epoch of each bucket."""
        return self.calls.ask_of([(bucket, (b"GET", self.names.epochs[bucket])) for bucket in BUCKETS], deadline)

    def _mark(self, buckets: Sequence[int], epoch: bytes, deadline: float) -> None:
        self.calls.ask_of([(bucket, (b"SET", self.names.epochs[bucket], epoch, b"NX")) for bucket in buckets], deadline)

    def _look(self, deadline: float) -> str:
        """Check every server and every epoch, and learn the epoch. SchemaError says what to do."""
        with self.calls.troubles():
            servers = [Server.of(at, answers) for at, answers in self.calls.ask_each(ASKED, deadline).items()]
        where = self.calls.where
        for server in servers:
            if sentence := evicts(server, where):
                raise SchemaError(sentence)
        marks = self._marks(deadline)
        found = {mark for mark in marks if mark is not None}
        if not found and self._epoch is None:
            raise SchemaError(
                f"{where} has no oncekey epoch. If oncekey has used it before, it has lost its keys: restore its data, "
                "or run `oncekey migrate --accept-loss`, never --init. Only if it is new, run `oncekey migrate --init`"
            )
        if None in marks:
            raise SchemaError(lost_sentence(where))
        epoch = found.pop()
        if found or (self._epoch is not None and epoch != self._epoch):
            raise self.calls.refused(Refusal(f"ONCEKEY-EPOCH {epoch.decode()}"))
        if epoch.decode().partition("-")[0] != LAYOUT:
            raise SchemaError(f"{where} has a layout of a newer version of oncekey: upgrade this one")
        self._epoch = epoch
        survives = self.settings.kind == "server" or self.settings.replicas > 0
        self.durable = survives and all(server.fsync_always for server in servers)
        if not self.durable and not self._warned:
            self._warned = True
            _log.warning(NOT_DURABLE, where)
        return epoch.decode()
