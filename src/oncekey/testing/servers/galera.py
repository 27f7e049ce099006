"""A Galera cluster of MariaDB servers for tests: nodes that are killed, and join again."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from oncekey.testing.servers.mysql import MysqlServer
from oncekey.testing.servers.packages import missing
from oncekey.testing.servers.processes import HOST, ServerFailed, free_port

_TIMES = "gcache.size=32M;evs.keepalive_period=PT0.5S;evs.suspect_timeout=PT2S"
"""A node that is gone is missed after two seconds. With less, nodes lose each other on a busy machine."""


class GaleraNode(MysqlServer):
    """One node. The first makes the cluster; the others copy its data by rsync when they start."""

    kind = "a Galera node"
    _start_seconds = 120.0

    def __init__(self, cluster: GaleraCluster, number: int) -> None:
        super().__init__(fsync=False, settings={"binlog-format": "ROW", "innodb-autoinc-lock-mode": "2"})
        self._cluster = cluster
        self.number = number
        self.group_port, self._ist_port, self._sst_port = free_port(), free_port(), free_port()
        self._makes_cluster = number == 0

    def _lay_out_data(self) -> None:
        if self._makes_cluster:
            super()._lay_out_data()
        else:
            self._data.mkdir()
            if self._user is not None:
                os.chown(self._data, self._user.pw_uid, self._user.pw_gid)

    def _command(self) -> list[str]:
        root = cast("Path", self._root)
        provider = next((path for path in _providers(root) if path.exists()), None)
        if provider is None:
            raise missing("Galera library")
        others = ",".join(f"{HOST}:{node.group_port}" for node in self._cluster.nodes)
        members = "gcomm://" if self._makes_cluster else f"gcomm://{others}"
        options = (
            f"gmcast.listen_addr=tcp://{HOST}:{self.group_port};ist.recv_addr={HOST}:{self._ist_port};"
            f"ist.recv_bind={HOST}:{self._ist_port};{_TIMES}"
        )
        return [
            *super()._command(),
            *("--wsrep-on=ON", f"--wsrep-provider={provider}", "--wsrep-cluster-name=oncekey"),
            *(f"--wsrep-cluster-address={members}", *(["--wsrep-new-cluster"] if self._makes_cluster else [])),
            *(f"--wsrep-node-name=n{self.number}", f"--wsrep-node-address={HOST}:{self.group_port}"),
            *(f"--wsrep-node-incoming-address={HOST}:{self.port}", f"--wsrep-provider-options={options}"),
            *("--wsrep-sst-method=rsync", f"--wsrep-sst-receive-address={HOST}:{self._sst_port}"),
        ]

    def _launch(self) -> None:
        super()._launch()
        self._makes_cluster = False  # after a kill it joins the others

    def _answers(self) -> bool:
        try:
            status = dict(self.execute("SHOW STATUS LIKE 'wsrep_%'", timeout=2.0))
        except (OSError, ServerFailed):
            return False
        return status.get("wsrep_ready") == "ON" and status.get("wsrep_local_state_comment") == "Synced"


class GaleraCluster:
    """Three nodes. Each takes writes."""

    def __init__(self, size: int = 3) -> None:
        self.nodes: list[GaleraNode] = []
        self.nodes += [GaleraNode(self, number) for number in range(size)]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def database(self, name: str) -> str:
        """Create a database, and return an address with all nodes."""
        self.nodes[0].database(name)
        return self.url_of(name)

    def url_of(self, name: str, first: int = 0) -> str:
        """An address that names this node first, and then the others."""
        order = [*self.nodes[first:], *self.nodes[:first]]
        hosts = ",".join(f"{HOST}:{node.port}" for node in order)
        return f"mysql://root@{hosts}/{name}"


def _providers(root: Path) -> list[Path]:
    return [root / "usr/lib/galera/libgalera_smm.so", root / "usr/lib64/galera/libgalera_smm.so"]
