"""A RabbitMQ server for tests."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from pathlib import Path

from oncekey.testing.servers.binaries import erlang_bin, find_rabbitmq, rabbitmq_home
from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.packages import libraries
from oncekey.testing.servers.processes import HOST, die_with_parent, free_port
from oncekey.testing.servers.server import Server


class RabbitServer(Server):
    """One RabbitMQ node without plugins. The user is ``guest``. A kill may lose queues that were declared just before.

    It runs Erlang directly, not Debian's scripts, which want a system user and folders below ``/var``. Erlang would
    start ``epmd``, its directory of nodes, as a daemon that outlives the test: so each server has an ``epmd`` of its
    own, as a child process.
    """

    kind = "RabbitMQ"
    _stop_signal = signal.SIGTERM
    _start_seconds = 180.0

    def __init__(self) -> None:
        super().__init__()
        self._root: Path | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._epmd_port = 0

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def _prepare(self) -> None:
        self._root = find_rabbitmq()
        self._folder = Folder("rabbitmq", None)
        (self._home / "plugins").write_text("[].\n")

    @property
    def _bin(self) -> Path:
        folder = None if self._root is None else erlang_bin(self._root)
        assert folder is not None, "found by _prepare"
        return folder

    @property
    def _rabbit(self) -> Path:
        folder = None if self._root is None else rabbitmq_home(self._root)
        assert folder is not None, "found by _prepare"
        return folder

    def _command(self) -> list[str]:
        (self._home / "rabbitmq.conf").write_text(f"listeners.tcp.1 = {HOST}:{self.port}\n")
        return [
            *(str(self._bin / "erlexec"), "-noinput", "-boot", "start_sasl"),
            *("-s", "rabbit", "boot", "-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
            *("-kernel", "inet_dist_use_interface", "{127,0,0,1}"),
            *("+W", "w", "+sbwt", "none", "+sbwtdcpu", "none", "+sbwtdio", "none"),  # no busy waiting: others work here
        ]

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        if self._epmd is None or self._epmd.poll() is not None:
            self._epmd_port = free_port()
            run = [str(self._bin / "epmd"), "-address", HOST, "-port", str(self._epmd_port)]
            self._epmd = subprocess.Popen(
                run,
                cwd=self._home,
                env=super()._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - one system call, looked up before
            )
        return super()._spawn(command)

    def _environment(self) -> dict[str, str]:
        root = self._root or Path("/")
        home = self._home
        return super()._environment() | {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries(root))),
            "ROOTDIR": str(root / "usr/lib/erlang"),
            "BINDIR": str(self._bin),
            "EMU": "beam",
            "PROGNAME": "erl",
            "PATH": f"{self._bin}:{root / 'usr/lib/erlang/bin'}:/usr/bin:/bin",
            "ERL_LIBS": str(self._rabbit / "plugins"),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_MAX_ETS_TABLES": "50000",
            "RABBITMQ_HOME": str(self._rabbit),
            "RABBITMQ_NODENAME": "rabbit@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_PLUGINS_DIR": str(self._rabbit / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_PID_FILE": str(home / "pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "config"),
            "RABBITMQ_LOGS": "-",
        }

    def _answers(self) -> bool:
        """A listener may be there before the server takes clients, so this begins AMQP's handshake."""
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 2.0) as sock:
            sock.settimeout(5.0)
            sock.sendall(b"AMQP\x00\x00\x09\x01")
            return sock.recv(1) == b"\x01"
        return False

    def stop(self) -> None:
        super().stop()
        if self._epmd is not None:
            self._epmd.terminate()
            self._epmd.wait()
            self._epmd = None
