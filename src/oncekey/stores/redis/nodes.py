"""Which server has which bucket: one server, the master that Sentinel names, or the masters of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from oncekey.errors import StoreUnavailable
from oncekey.stores.redis.buckets import BUCKETS, SLOTS
from oncekey.stores.redis.connection import Lost, connect
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.redis.urls import Address, Settings


class Nodes:
    """The address of each bucket. ``forget`` makes the next question ask the servers again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: Sequence[Address] | None = None
        self.forget()
        self._masters: tuple[Address, ...] = ()
        self._find = self._by_sentinel if settings.kind == "sentinel" else self._by_cluster

    def of(self, bucket: int, deadline: float) -> Address:
        known = self._known
        if known is None:
            known = self._known = self._find(deadline)
        return known[bucket]

    def known(self, bucket: int) -> Address:
        """As ``of``, without asking a server: StoreUnavailable if that would be needed."""
        known = self._known
        if known is None:
            raise StoreUnavailable("the servers must be asked which of them has the key")
        return known[bucket]

    def all(self, deadline: float) -> list[Address]:
        """Every server that has a bucket."""
        return list(dict.fromkeys(self.of(bucket, deadline) for bucket in BUCKETS))

    def forget(self) -> None:
        """With one server there is no question: the URL has the address of every bucket."""
        one_server = self._settings.kind == "server"
        self._known = [self._settings.hosts[0]] * len(BUCKETS) if one_server else None

    def _by_sentinel(self, deadline: float) -> list[Address]:
        options = self._settings.options | self._settings.sentinel_login | {"db": None}
        asked = [b"SENTINEL", b"get-master-addr-by-name", self._settings.name.encode()]

        def read(reply: Any, asked_at: Address) -> list[Address]:
            del asked_at
            host, port = reply
            return [(host.decode(), int(port))] * len(BUCKETS)

        return self._ask_any(self._settings.hosts, options, asked, read, deadline, "no sentinel names the master")

    def _by_cluster(self, deadline: float) -> list[Address]:
        hosts = tuple(dict.fromkeys((*self._masters, *self._settings.hosts)))
        found = self._ask_any(
            *(hosts, self._settings.options, [b"CLUSTER", b"SLOTS"], masters, deadline),
            "no node of the cluster can be asked for its slots",
        )
        self._masters = tuple(dict.fromkeys(found))
        return found

    def _ask_any(
        self,
        hosts: Sequence[Address],
        options: dict[str, Any],
        asked: list[bytes],
        read: Callable[[Any, Address], list[Address]],
        deadline: float,
        trouble: str,
    ) -> list[Address]:
        """The answer of the first host that has one. Each gets an equal part of the time that is left."""
        last = trouble
        for number, host in enumerate(hosts):
            try:
                share = _share(deadline, len(hosts) - number)
                link = connect(host, options, share)
                try:
                    (reply,) = link.ask([asked], share)
                finally:
                    link.close()
                if isinstance(reply, list):
                    return read(reply, host)
            except (Lost, Refusal, ValueError, KeyError, TypeError, IndexError) as error:
                last = f"{trouble} ({type(error).__name__})"
        raise Lost(f"is unavailable: {last}")


def _share(deadline: float, parts: int) -> float:
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts


def masters(slots: list[Any], asked_at: Address) -> list[Address]:
    """The master of each bucket's slot, from the answer to CLUSTER SLOTS."""
    found = []
    for slot in SLOTS:
        of_slot = next((entry[2] for entry in slots if entry[0] <= slot <= entry[1]), None)
        if of_slot is None:
            raise KeyError(slot)  # no master has it: the cluster is not whole
        host, port = of_slot[0], of_slot[1]
        found.append((host.decode() if host else asked_at[0], int(port)))  # no host: the one that was asked
    return found
