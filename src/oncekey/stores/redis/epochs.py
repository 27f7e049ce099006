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
from oncekey.stores.redis.batches import Call
from oncekey.stores.redis.buckets import BUCKETS, Names, bucket_of, name_of
from oncekey.stores.redis.calls import Calls
from oncekey.stores.redis.connection import Link
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.redis.servers import ASKED, Server
from oncekey.stores.redis.watch import NOT_DURABLE

if TYPE_CHECKING:
    from oncekey.stores.redis.urls import Settings

LAYOUT = "2"
EPOCH_NAME = ("", "oncekey:epoch")
"""Under this scope and key the audit has the losses that an operator accepted. No request can have an empty scope."""
_RACE_SECONDS = 2.0
"""How long a second ``--init`` waits for a first one that is half done."""


_log = logging.getLogger("oncekey")


class _CheckedCalls(Calls):
    """Connections only to servers that evict nothing, and refusals about epochs in words."""

    def check_server(self, link: Link, deadline: float) -> None:
        if sentence := self.watch.refuses(Server.of(link.address, link.ask(ASKED, deadline))):
            raise SchemaError(sentence)

    def refused(self, refusal: Refusal) -> OnceKeyError:
        if refusal.code != "ONCEKEY-EPOCH":
            return super().refused(refusal)
        if refusal.rest:
            return SchemaError(
                f"{self.where} has another epoch than this process knows, epoch {refusal.rest}: it was emptied and set "
                "up again, or it is another Redis. Requests are refused, because lost keys would look new. If this is "
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

    _warned = False

    if TYPE_CHECKING:
        settings: Settings
        names: Names

    def _open(self) -> None:
        self.calls: Calls = _CheckedCalls(self.settings)
        self._epoch = self.settings.epoch.encode() if self.settings.epoch else None

    def _run(self, calls: Sequence[Call], deadline: float, *, confirmed: bool) -> list[Any]:
        return self.calls.run(calls, deadline, confirmed=confirmed)

    def _learn(self, deadline: float) -> None:
        """Ask the servers, once, for what every call needs."""
        if self._epoch is None or self.calls.together is None:
            self._look(deadline)

    def learned(self) -> tuple[bytes, bool]:
        """The epoch, and whether one script may touch several buckets; without asking a server."""
        epoch, together = self._epoch, self.calls.together
        if epoch is None or together is None:
            raise StoreUnavailable("the epoch is not known yet")
        return epoch, together

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
        """Give all buckets a new epoch, and write into the audit which operator accepted the loss, and of what.

        The audit is written before the last bucket has the epoch. If this is cut off, requests are still refused.
        """
        deadline = self._deadline()
        marks = self._marks(deadline)
        self._refuse_other_layouts(marks)
        known = sorted({mark.decode() for mark in marks if mark is not None})
        epoch = f"{LAYOUT}-{secrets.token_hex(8)}".encode()
        name = name_of(*EPOCH_NAME)
        audited = bucket_of(name)
        self._replace_marks([audited], epoch, deadline)
        lost = sum(mark is None for mark in marks)
        words = (
            audit.who,
            "accept_loss",
            ", ".join(known) or "none",
            epoch.decode(),
            f"{lost} of 16 buckets: {audit.why}",
        )
        values = (epoch, b"1", b"0", name, orjson.dumps(words))
        self._run([Call(audited, scripts.NOTE, [self.names.epochs[audited]], values, ())], deadline, confirmed=False)
        self._replace_marks([bucket for bucket in BUCKETS if bucket != audited], epoch, deadline)
        self._epoch = epoch
        return self._look(deadline)

    # -- epochs --------------------------------------------------------------------------------------------------

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.timeout

    def _marks(self, deadline: float) -> list[bytes | None]:
        """The epoch of each bucket."""
        return self.calls.ask_of([(bucket, (b"GET", self.names.epochs[bucket])) for bucket in BUCKETS], deadline)

    def _mark(self, buckets: Sequence[int], epoch: bytes, deadline: float) -> None:
        self.calls.ask_of([(bucket, (b"SET", self.names.epochs[bucket], epoch, b"NX")) for bucket in buckets], deadline)

    def _replace_marks(self, buckets: Sequence[int], epoch: bytes, deadline: float) -> None:
        self.calls.ask_of([(bucket, (b"SET", self.names.epochs[bucket], epoch)) for bucket in buckets], deadline)

    def _look(self, deadline: float) -> str:
        """Check every server and every epoch, and learn the epoch. SchemaError says what to do."""
        with self.calls.troubles():
            servers = [Server.of(at, answers) for at, answers in self.calls.ask_each(ASKED, deadline).items()]
        where, watch = self.calls.where, self.calls.watch
        watch.keep_only(server.address for server in servers)
        for server in servers:
            if sentence := watch.refuses(server):
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
        self._refuse_other_layouts([epoch])
        self._epoch = epoch
        if self.calls.together is None:
            self.calls.together = self._spans_buckets(deadline)
        if not watch.durable and not self._warned:
            self._warned = True
            _log.warning(NOT_DURABLE, where)
        return epoch.decode()

    def _refuse_other_layouts(self, marks: Sequence[bytes | None]) -> None:
        """Also before a loss is accepted: this version cannot read such rows, and would write into them."""
        for mark in marks:
            if mark is not None and mark.decode().partition("-")[0] != LAYOUT:
                raise SchemaError(
                    f"{self.calls.where} has the layout of another version of oncekey (epoch {mark.decode()}): use "
                    "that version, another Redis, or another prefix= in the URL"
                )

    def _spans_buckets(self, deadline: float) -> bool:
        """Whether one script may touch several buckets. A node of a cluster refuses it, also one that has all slots."""
        probe = (b"EVAL", b"return 1", b"2", *self.names.epochs[:2])
        ((answer,),) = self.calls.ask_each([probe], deadline).values()
        if not isinstance(answer, Refusal):
            return True
        if answer.code == "CROSSSLOT":
            return False
        raise self.calls.refused(answer)
