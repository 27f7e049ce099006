"""Whether a server still is what it was at the start: it evicts nothing, has evicted nothing, and writes to disk.

An operator can change all of this under a running app (``CONFIG SET``). So about once a second a batch takes ``ASKED``
along to its server: more commands in a round trip that is made anyway. They stand after the scripts of the batch, so
that they show also what the server evicted to make room for these scripts.

An eviction is noticed in two ways. If the policy allows it now, calls are refused until it does not. If the server's
count of evicted keys has grown since this process first saw that server, keys are gone, and oncekey cannot tell which:
calls are refused until the process ends, as after a lost epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from oncekey.stores.redis.connection import Command, Link
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.redis.servers import ASKED, Server, evicts
from oncekey.stores.redis.urls import Address, Settings

LOOK_SECONDS = 1.0

NOT_DURABLE = (
    "%s may lose what it has confirmed: if it dies, it comes back with older data, and retries of the keys that are "
    "missing run again. Its epoch cannot tell. Set appendonly yes and appendfsync always, and with Sentinel or Cluster "
    "also ?replicas=1 in the URL; or keep keys of payments in a database. `oncekey doctor` and docs/stores.md say more"
)
"""Logged when a store first looks at a Redis that writes to disk late or never, and when a running one becomes so."""

_log = logging.getLogger("oncekey")


class ServerWatch:
    """What one store knows about its servers. All threads and event loops of a process share it."""

    def __init__(self, settings: Settings) -> None:
        self._where = settings.where
        self._survives = settings.kind == "server" or settings.replicas > 0
        self._next: dict[Address, float] = {}
        self._servers: dict[Address, Server] = {}
        self._evicted_at_first: dict[str, int] = {}
        self._loss: str | None = None
        self._refusals: dict[Address, int] = {}

    @property
    def durable(self) -> bool:
        """Whether every server writes each command to disk before it answers; False until a server was looked at."""
        servers = self._servers.values()
        return self._survives and bool(servers) and all(server.fsync_always for server in servers)

    def refusals(self, address: Address) -> int:
        """How many looks have refused this server. A connection keeps the number at which it was checked."""
        return self._refusals.get(address, 0)

    def may_use(self, link: Link) -> bool:
        """Whether no look has refused the server of a checked connection since. False: check it again."""
        return self._loss is None and link.checked_at == self.refusals(link.address)

    def due(self, address: Address) -> tuple[Command, ...]:
        """What the next batch to this server must ask along. Mostly nothing."""
        now = time.monotonic()
        if now < self._next.get(address, 0.0):
            return ()
        self._next[address] = now + LOOK_SECONDS
        return ASKED

    def answered(self, address: Address, answers: Sequence[Any]) -> str | None:
        """Why this server may not be used, from its answers to :meth:`due`."""
        if isinstance(answers[0], Refusal) and answers[0].code != "NOPERM":
            return None  # it refused the scripts of the batch as well, and they say why
        return self.refuses(Server.of(address, list(answers)))

    def refuses(self, server: Server) -> str | None:
        """Why this server may not be used; None: it may."""
        self._next[server.address] = time.monotonic() + LOOK_SECONDS
        self._compare_persistence(server)
        self._compare_evicted(server)
        sentence = evicts(server, self._where) or self._loss
        if sentence is not None:
            self._refusals[server.address] = self.refusals(server.address) + 1
        return sentence

    def keep_only(self, addresses: Iterable[Address]) -> None:
        """Forget how the other servers write to disk: they are no longer among the store's."""
        kept = set(addresses)
        self._servers = {address: server for address, server in self._servers.items() if address in kept}

    def _compare_evicted(self, server: Server) -> None:
        """The count belongs to one run of one server: after a restart it begins at 0, under another ``run_id``."""
        run = server.info.get("run_id", "")
        first = self._evicted_at_first.setdefault(run, server.evicted)
        if server.evicted < first:  # CONFIG RESETSTAT
            self._evicted_at_first[run] = server.evicted
        elif server.evicted > first and self._loss is None:
            self._loss = (
                f"{self._where} has evicted {server.evicted - first} keys while this process ran: its maxmemory-policy "
                "was not noeviction for a time. Requests are refused, because evicted keys would look new. Restore its "
                "data, or accept the loss with `oncekey migrate --accept-loss`, and restart the app"
            )

    def _compare_persistence(self, server: Server) -> None:
        before = self._servers.get(server.address)
        self._servers[server.address] = server
        if before is not None and before.persistence != server.persistence and not server.fsync_always:
            _log.warning(NOT_DURABLE, self._where)
