"""What a server says about itself: eviction, persistence, replication. From INFO, and CONFIG where it is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from oncekey.stores.redis.connection import Command
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.redis.urls import Address

ASKED: tuple[Command, ...] = (
    (b"INFO",),
    (b"CONFIG", b"GET", b"appendfsync"),
    (b"CONFIG", b"GET", b"min-replicas-to-write"),
    (b"TIME",),
)
_SAFE = "noeviction"


@dataclass(frozen=True)
class Server:
    address: Address
    info: dict[str, str]
    appendfsync: str | None
    """None: CONFIG is not allowed here, as in many hosted services."""
    min_replicas: str | None
    time: float | None

    @classmethod
    def of(cls, address: Address, answers: list[Any]) -> Self:
        """From the answers to ``ASKED``."""
        info, fsync, replicas, clock = answers
        if isinstance(info, Refusal):
            if info.code != "NOPERM":
                raise info
            info = b""
        lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
        told = {name: value.strip() for name, colon, value in lines if colon}
        seconds = None if isinstance(clock, Refusal) else int(clock[0]) + int(clock[1]) / 1e6
        return cls(address, told, _setting(fsync), _setting(replicas), seconds)

    @property
    def policy(self) -> str:
        return self.info.get("maxmemory_policy", "not told")

    @property
    def appends(self) -> bool:
        return self.info.get("aof_enabled") == "1"

    @property
    def fsync_always(self) -> bool:
        return self.appends and self.appendfsync == "always"

    @property
    def persistence(self) -> tuple[bool, str | None]:
        return self.appends, self.appendfsync

    @property
    def evicted(self) -> int:
        """How many keys it has evicted since it was started, of all its databases and programs."""
        return int(self.info.get("evicted_keys", "0"))

    @property
    def replicas(self) -> int:
        return int(self.info.get("connected_slaves", "0"))

    @property
    def shown(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"


def _setting(answer: Any) -> str | None:
    return answer[1].decode() if isinstance(answer, list) and len(answer) == 2 else None


def evicts(server: Server, where: str) -> str | None:
    """Why oncekey does not use this server; None: it evicts nothing."""
    if server.policy == _SAFE:
        return None
    return (
        f"{where}: its maxmemory-policy is {server.policy}, so it deletes keys when its memory is full, and their "
        "retries would run again. Set maxmemory-policy to noeviction; until then oncekey takes no requests"
    )
