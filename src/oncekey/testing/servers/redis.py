"""A Redis server for tests, a cluster of them, and a master that sentinels watch."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from oncekey.testing.servers.binaries import find_redis
from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.packages import libraries, unpacked
from oncekey.testing.servers.processes import HOST, ServerFailed, wait_until
from oncekey.testing.servers.server import Server

_SLOTS: Final = 16384
_FORM_SECONDS: Final = 30.0
_NODE_TIMEOUT: Final = "500"
"""Milliseconds after which a cluster or a sentinel takes a silent master for dead: a failover in 1 to 2 seconds."""


class RedisServer(Server):
    """A Redis server that evicts nothing. ``durable=True``: each command is on disk before its answer."""

    kind = "Redis"
    _stop_signal = signal.SIGTERM

    def __init__(self, *, durable: bool = False, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._binary: Path | None = None
        self._settings = {
            "bind": HOST,
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if durable else "no",
            "appendfsync": "always",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def flush(self) -> None:
        """Delete every key."""
        self._ask("FLUSHALL")

    def command(self, *words: str) -> str:
        """Send one command, and return the answer: a line, or a text of several."""
        sent = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words)
        with socket.create_connection((HOST, self.port), 5.0) as sock, sock.makefile("rb") as answers:
            sock.sendall(b"*%d\r\n%s" % (len(words), sent))
            line = answers.readline()
            if line.startswith(b"$") and int(line[1:]) >= 0:
                return answers.read(int(line[1:])).decode(errors="replace")
        if not line or line.startswith(b"-"):
            raise ServerFailed(f"Redis answered {words[0]} with {line.decode(errors='replace').strip() or 'nothing'}")
        return line[1:].decode(errors="replace").strip()

    def _ask(self, command: str) -> str:
        with socket.create_connection((HOST, self.port), 5.0) as sock, sock.makefile("rb") as answers:
            sock.sendall(command.encode() + b"\r\n")
            answer = answers.readline().decode(errors="replace").strip()
        if not answer.startswith("+"):
            raise ServerFailed(f"Redis answered {command} with {answer or 'nothing'}")
        return answer

    def _prepare(self) -> None:
        self._binary = find_redis()
        self._folder = Folder("redis", None)

    def _environment(self) -> dict[str, str]:
        environment, root = super()._environment(), unpacked("redis")
        if root is not None and self._binary is not None and self._binary.is_relative_to(root):
            environment["LD_LIBRARY_PATH"] = ":".join(map(str, libraries(root)))
        return environment

    def _command(self) -> list[str]:
        settings = [word for name, value in self._settings.items() for word in (f"--{name}", value)]
        return [str(self._binary), "--port", str(self.port), "--dir", str(self._home), *settings]

    def _answers(self) -> bool:
        try:
            return self._ask("PING") == "+PONG"
        except (OSError, ServerFailed):
            return False


class _Group:
    """Several servers that are started and stopped together."""

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []

    def start(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


class RedisCluster(_Group):
    """Three masters with a replica each. A killed node can be started again, and comes back as a replica."""

    def __init__(self, *, durable: bool = False, masters: int = 3) -> None:
        super().__init__()
        self._masters = masters
        settings = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": _NODE_TIMEOUT,
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": "0",
        }
        self.servers = [RedisServer(durable=durable, settings=settings) for _ in range(2 * masters)]

    def start(self) -> None:
        for server in self.servers:
            server.start()
        masters, replicas = self.servers[: self._masters], self.servers[self._masters :]
        for number, server in enumerate(masters):
            share = range(number * _SLOTS // self._masters, (number + 1) * _SLOTS // self._masters)
            server.command("CLUSTER", "ADDSLOTS", *map(str, share))
            server.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for server in self.servers[1:]:
            server.command("CLUSTER", "MEET", HOST, str(self.servers[0].port))
        self._wait(lambda: all(len(self._nodes(server)) == len(self.servers) for server in self.servers), "meet")
        for master, replica in zip(masters, replicas, strict=True):
            replica.command("CLUSTER", "REPLICATE", master.command("CLUSTER", "MYID"))
        self.wait_until_whole()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def masters(self) -> list[RedisServer]:
        """The running servers that are masters now."""
        return [server for server in self.servers if server.running and "role:master" in _replication(server)]

    def replica_of(self, master: RedisServer) -> RedisServer | None:
        for server in self.servers:
            if server is not master and server.running and f"master_port:{master.port}" in _replication(server):
                return server
        return None

    def wait_until_whole(self) -> None:
        """Until all slots are served, and each master has a replica that is in step."""

        def whole() -> bool:
            return all("cluster_state:ok" in server.command("CLUSTER", "INFO") for server in self.servers) and all(
                "connected_slaves:1" in (told := _replication(server)) and "state=online" in told
                for server in self.masters()
            )

        self._wait(whole, "become whole")
        self._wait(lambda: len(self.masters()) == self._masters, "have its masters")

    def _wait(self, done: object, what: str) -> None:
        def ready() -> bool:
            try:
                return bool(done())  # type: ignore[operator]  # a function without arguments
            except (OSError, ServerFailed):
                return False

        if not wait_until(ready, _FORM_SECONDS):
            raise ServerFailed(f"the Redis cluster did not {what} within {_FORM_SECONDS:g} s")

    def _nodes(self, server: RedisServer) -> Sequence[str]:
        return [line for line in server.command("CLUSTER", "NODES").splitlines() if "handshake" not in line]


def _replication(server: RedisServer) -> str:
    try:
        return server.command("INFO", "replication")
    except (OSError, ServerFailed):
        return ""


class _Sentinel(RedisServer):
    """``redis-server --sentinel`` with a configuration file of its own, which it rewrites."""

    def __init__(self, master: RedisServer) -> None:
        super().__init__()
        self._master = master

    def _command(self) -> list[str]:
        file = self._home / "sentinel.conf"
        if not file.exists():
            lines = [
                *(f"port {self.port}", f"bind {HOST}", f"dir {self._home}"),
                f"sentinel monitor main {HOST} {self._master.port} 2",
                f"sentinel down-after-milliseconds main {_NODE_TIMEOUT}",
                "sentinel failover-timeout main 3000",
            ]
            file.write_text("\n".join(lines) + "\n")
        return [str(self._binary), str(file), "--sentinel"]


class RedisSentinel(_Group):
    """A master, a replica, and three sentinels that watch them under the name ``main``."""

    def start(self) -> None:
        self.data = [RedisServer(settings={"repl-diskless-sync-delay": "0"}) for _ in range(2)]
        self.servers += self.data
        for server in self.data:
            server.start()
        self.data[1].command("REPLICAOF", HOST, str(self.data[0].port))
        if not wait_until(lambda: "state=online" in _replication(self.data[0]), _FORM_SECONDS):
            raise ServerFailed("the replica did not come online")
        self.sentinels = [_Sentinel(self.data[0]) for _ in range(3)]
        self.servers += self.sentinels
        for sentinel in self.sentinels:
            sentinel.start()
        knows = "slaves=1,sentinels=3"
        if not wait_until(lambda: all(knows in each.command("INFO", "sentinel") for each in self.sentinels), 30.0):
            raise ServerFailed("the sentinels did not find each other")

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"{HOST}:{server.port}" for server in self.sentinels) + "/main"
