"""What ``oncekey doctor`` asks Redis. It only reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.errors import SchemaError
from oncekey.stores.redis.servers import ASKED, Server, evicts
from oncekey.stores.sql import diagnosis

if TYPE_CHECKING:
    from oncekey.core.audit import AuditLine
    from oncekey.stores.redis.calls import Calls
    from oncekey.stores.redis.urls import Settings


class Probes:
    """Part of ``RedisStore``."""

    if TYPE_CHECKING:
        calls: Calls
        settings: Settings

        def _deadline(self) -> float: ...
        def _look(self, deadline: float) -> str: ...
        def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]: ...

    def diagnose(self) -> list[Diagnosis]:
        before = time.time()
        answers = self.calls.ask_each(ASKED, self._deadline())
        after = time.time()
        with self.calls.troubles():
            servers = [Server.of(address, each) for address, each in answers.items()]
        found = [eviction(servers, self.calls.where)]
        try:
            found.append(Diagnosis("epoch", Level.OK, f"{self._look(self._deadline())}, in all 16 buckets"))
        except SchemaError as error:
            if str(error) != found[0].found:  # the look at the epochs looks at the policy first
                found.append(Diagnosis("schema", Level.FAIL, str(error), "docs/stores.md says what an epoch is"))
        found += persistence(servers)
        found += replication(servers, self.settings)
        found += memory(servers)
        clocks = [server.time for server in servers if server.time is not None]
        if clocks:
            furthest = max((clock - (before + after) / 2 for clock in clocks), key=abs)
            found.append(diagnosis.clock(furthest, (after - before) / 2))
        return found


def eviction(servers: list[Server], where: str) -> Diagnosis:
    for server in servers:
        if sentence := evicts(server, where):
            advice = f"CONFIG SET maxmemory-policy noeviction on {server.shown}, and in its configuration file"
            return Diagnosis("schema", Level.FAIL, sentence, advice)
    if evicted := sum(server.evicted for server in servers):
        found = f"maxmemory-policy is noeviction now, but {evicted} keys were evicted since the server was started"
        advice = (
            "if that was after `oncekey migrate --init`, keys of oncekey may be missing, and their retries run again: "
            "restore the data, or `oncekey migrate --accept-loss`. CONFIG RESETSTAT ends this line"
        )
        return Diagnosis("eviction", Level.WARN, found, advice)
    return Diagnosis("eviction", Level.OK, "maxmemory-policy noeviction")


def persistence(servers: list[Server]) -> Iterator[Diagnosis]:
    advice = "appendonly yes and appendfsync always, if a retry after a power cut must not run again (docs/stores.md)"
    if all(server.fsync_always for server in servers):
        yield Diagnosis("durability", Level.OK, "appendonly yes, appendfsync always")
    elif not all(server.appends for server in servers):
        found = "appendonly is off: keys since the last snapshot are lost when the server ends"
        yield Diagnosis("durability", Level.WARN, found, advice)
    elif any(server.appendfsync is None for server in servers):
        found = "appendonly yes; appendfsync is not told (CONFIG is not allowed), so oncekey counts it as not durable"
        yield Diagnosis("durability", Level.WARN, found, advice)
    else:
        modes = ", ".join(sorted({str(server.appendfsync) for server in servers}))
        found = f"appendonly yes, appendfsync {modes}: the last writes are lost with the host"
        yield Diagnosis("durability", Level.WARN, found, advice)


def replication(servers: list[Server], settings: Settings) -> Iterator[Diagnosis]:
    for server in servers:
        if server.info.get("role") != "master":
            found = f"{server.shown} is a replica and takes no writes"
            yield Diagnosis("replicas", Level.FAIL, found, "point --store at the master, or use redis+sentinel://")
            return
    fewest = min(server.replicas for server in servers)
    if settings.replicas > fewest:
        found = f"the URL asks for {settings.replicas} replicas, and a server has {fewest}: every request gets 503"
        yield Diagnosis("replicas", Level.FAIL, found, "start replicas, or lower replicas=")
    elif settings.kind != "server" and not settings.replicas:
        found = "a failover can lose writes that were answered: no replica has to confirm them"
        yield Diagnosis("replicas", Level.WARN, found, "add ?replicas=1 to the URL")
    else:
        asked = f"{settings.replicas} must confirm each write" if settings.replicas else "none has to confirm a write"
        yield Diagnosis("replicas", Level.OK, f"{fewest} connected, {asked}")


def memory(servers: list[Server]) -> Iterator[Diagnosis]:
    for server in servers:
        used, most = (int(server.info.get(name, "0")) for name in ("used_memory", "maxmemory"))
        if most and used > 0.8 * most:
            found = f"{server.shown} uses {used / most:.0%} of its maxmemory: when it is full, requests get 503"
            yield Diagnosis("memory", Level.WARN, found, "raise maxmemory, or keep keys for a shorter time (ttl)")
            return
    yield Diagnosis("memory", Level.OK, "enough is free, or there is no limit")
