"""The open connections to one file: one per thread, none across a fork, every sqlite3 error in plain words.

Owns opening, settings, closing, and the check that the file on disk still is the file that was opened. Runs
no statement of the store's own.

Why a fork needs care: SQLite keeps its file locks in tables of the process. A forked child that inherits an
open connection inherits these tables too, so it assumes locks that the kernel gave only to its parent. When the
parent closes the file, the parent deletes the write-ahead log that the child still uses, and commits of the child
are lost without an error (test_a_child_loses_nothing_when_its_parent_closes shows it). So all connections are
closed *before* a fork, and both processes open new ones. If a connection could not be closed in time, the child
keeps a reference to it for ever, because closing it in the child does harm too.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from oncekey.errors import ConfigurationError, StoreError, StoreUnavailable

_RETRY_SECONDS = 0.01
"""The pause between two tries to switch to WAL. The busy time-out does not apply to that switch."""

SETTINGS = (
    "PRAGMA synchronous = FULL",  # NORMAL loses commits with the power (hazard 23)
    "PRAGMA foreign_keys = ON",  # for business tables that refer to a key
)
"""What every connection that writes must have."""

BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_IN_WORDS = {
    sqlite3.SQLITE_READONLY: "cannot be written: the file or its folder is read-only",
    sqlite3.SQLITE_PERM: "cannot be opened: permission denied",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: look at the permissions of the file and its folder, whether its file "
    "system is read-only, and at this process's limit of open files (ulimit -n)",
    sqlite3.SQLITE_NOTADB: "is not an SQLite database: give another path, or move the file away",
    sqlite3.SQLITE_CORRUPT: "is damaged: run `PRAGMA integrity_check` on it and restore it from a backup",
}

FileId = tuple[int, int]


class _Handle:
    """One thread's connection. Its lock is held while a verb runs: close() and fork wait for the verb."""

    __slots__ = ("connection", "file_id", "lock", "log_id")

    def __init__(self, connection: sqlite3.Connection, file_id: FileId | None, log_id: FileId | None) -> None:
        self.connection: sqlite3.Connection | None = connection
        self.lock = threading.Lock()
        self.file_id = file_id
        self.log_id = log_id

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


class Connections:
    """``prepare`` runs on every new connection before its first use.

    ``beside``: other Connections to the same file. They created or found the file, so this object neither creates a
    file nor accepts another file at that path. ``lock_seconds``: how long ``prepare`` lets them wait for another
    writer, if not for ``timeout``.
    """

    or_else = ", or restart the app to begin a new file, which knows no key: retries of earlier requests then run again"
    """What can be done about a file that is gone, beside putting it back."""

    def __init__(
        self,
        path: Path,
        timeout: float,
        prepare: Callable[[sqlite3.Connection], None],
        *,
        beside: Connections | None = None,
        lock_seconds: float | None = None,
    ) -> None:
        self.path = path
        self.timeout = timeout
        self.lock_seconds = timeout if lock_seconds is None else lock_seconds
        self._prepare = prepare
        self._beside = beside
        self._log = f"{path}-wal"
        self._file_id: FileId | None = None
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        # Every thread takes the locks in this order: ``_opening``, a handle's lock, the gate.
        self._opening = threading.Lock()
        self._local = threading.local()
        self._handles: dict[threading.Thread, _Handle] = {}

    @contextmanager
    def use(self, *, check: bool = True) -> Iterator[sqlite3.Connection]:
        """The calling thread's connection. An sqlite3 error in the block becomes an error of oncekey.

        With ``check=False``, the caller must call :meth:`check_files` before it trusts what the block read or wrote.
        """
        try:
            handle, connection = self._mine()
            try:
                yield connection
                if check:
                    self._still_there(handle)
            except sqlite3.Error as error:
                if _code(error) not in BUSY:
                    handle.close()  # the connection may be damaged, so the next verb opens a new one
                raise
            finally:
                handle.lock.release()
        except sqlite3.Error as error:
            raise self.in_words(_code(error), str(error), self.lock_seconds) from error
        except (UnicodeEncodeError, OverflowError) as error:
            # The file is intact: one row of the batch is bad, and the lane finds it (hazard 25).
            raise StoreError("a value is not valid text or too large a number: cannot be stored") from error

    def _mine(self) -> tuple[_Handle, sqlite3.Connection]:
        """The calling thread's handle, with its lock held, and its open connection."""
        while True:
            handle: _Handle | None = getattr(self._local, "handle", None)
            if handle is None or handle.connection is None:
                if not self._opening.acquire(timeout=self.timeout):
                    raise StoreUnavailable(f"{self.path} could not be opened within {self.timeout:g} s")
                try:
                    handle = self._local.handle = self._open()
                finally:
                    self._opening.release()
            handle.lock.acquire()
            if handle.connection is not None:
                return handle, handle.connection
            handle.lock.release()  # a fork or close() closed it in between: open again

    def _open(self) -> _Handle:
        for thread, handle in list(self._handles.items()):
            if handle.connection is None or not thread.is_alive():
                handle.close()
                del self._handles[thread]
        if not self.path.parent.is_dir():
            raise StoreUnavailable(f"{self.path} cannot be opened: its folder does not exist")
        known = self._file_id if self._beside is None else self._beside._file_id
        if known is not None and _file_id(self.path) != known:
            raise self._gone()
        # A known file is never created again. Opening an empty file in its place would delete the old file's log, and
        # the last commits with it. The file may disappear after the check above, so the mode must prevent it.
        makes = known is None and self._beside is None
        name = f"{self.path.as_uri()}?mode={'rwc' if makes else 'rw'}"
        connection = sqlite3.connect(
            name, timeout=self.timeout, isolation_level=None, check_same_thread=False, uri=True
        )
        try:
            self._switch_to_wal(connection)
            for setting in SETTINGS:
                connection.execute(setting)
            self._prepare(connection)
            handle = _Handle(connection, _file_id(self.path), _file_id(self._log))
            if known not in (None, handle.file_id):
                raise self._gone()
        except BaseException:
            connection.close()
            raise
        self._file_id = handle.file_id
        self._handles[threading.current_thread()] = handle
        return handle

    def _switch_to_wal(self, connection: sqlite3.Connection) -> None:
        end = time.monotonic() + self.timeout
        mode = ""
        while not mode:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if _code(error) not in BUSY or time.monotonic() >= end:
                    raise
                time.sleep(_RETRY_SECONDS)
        if mode != "wal":
            raise ConfigurationError(
                f"{self.path} cannot use write-ahead logging (it says '{mode}'): put it on a local disk"
            )

    def check_files(self) -> None:
        """The check at the end of every ``use``, for the idle connections of other threads."""
        for handle in list(self._handles.values()):
            with handle.lock:
                if handle.connection is not None:
                    self._still_there(handle)

    def _still_there(self, handle: _Handle) -> None:
        """StoreUnavailable if the file was moved or deleted: then what was just written or read is lost.

        A new, empty file would turn every key into a first request (hazard 12). So this store refuses every verb
        until the file is back, or until the app closes the store and opens it again.
        """
        try:
            self.compare_files(handle.file_id, handle.log_id)
        except StoreUnavailable:
            handle.close()
            raise

    def compare_files(self, file_id: FileId | None, log_id: FileId | None) -> None:
        """StoreUnavailable unless the file and its log on the disk are those that a connection has open."""
        if _file_id(self.path) != file_id:
            raise self._gone()
        if _file_id(self._log) != log_id:
            raise StoreUnavailable(
                f"the write-ahead log of {self.path} was deleted while in use, the last write may be lost: "
                "close connections to this file before a fork, and never delete its -wal"
            )

    def _gone(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self.path} was removed or replaced while in use: put it back{self.or_else}")

    def in_words(self, code: int, said: str, lock_seconds: float) -> StoreUnavailable:
        """SQLite's primary error code as an error of oncekey; ``said`` is SQLite's own text."""
        if code in BUSY:
            return StoreUnavailable(f"{self.path} was locked by another writer for over {lock_seconds:g} s")
        return StoreUnavailable(f"{self.path} {_IN_WORDS.get(code, f'failed: {said}')}")

    @property
    def file_id(self) -> FileId | None:
        """The file that was opened first. None: no connection has been opened."""
        return self._file_id

    def disconnect(self) -> None:
        """Close the calling thread's connection."""
        handle: _Handle | None = getattr(self._local, "handle", None)
        if handle is not None:
            with handle.lock:
                handle.close()

    def close(self) -> None:
        """Close the connections of all threads, each when its running verb ends."""
        with self._opening:
            self._close_all(time.monotonic() + self.timeout)
            self._file_id = None

    def _close_all(self, end: float) -> None:
        for thread, handle in list(self._handles.items()):
            if handle.lock.acquire(timeout=max(end - time.monotonic(), 0.0)):
                try:
                    handle.close()
                finally:
                    handle.lock.release()
                del self._handles[thread]

    # around a fork

    def before_fork(self) -> bool:
        """Close all connections, and block new ones until the fork is over. False: a thread is still opening one."""
        end = time.monotonic() + self.timeout
        held = self._opening.acquire(timeout=self.timeout)
        self._close_all(end)
        return held

    def after_fork_in_parent(self, held: bool) -> None:
        if held:
            self._opening.release()

    def after_fork_in_child(self) -> None:
        _INHERITED.extend(self._handles.values())
        self._reset()


def is_busy(error: sqlite3.Error) -> bool:
    """Whether the error says that another connection holds the lock."""
    return _code(error) in BUSY


def _code(error: sqlite3.Error) -> int:
    """The primary code of SQLite's extended error code; 0 if Python's sqlite3 module raised the error itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _file_id(path: str | Path) -> FileId | None:
    try:
        stat = os.stat(path)  # noqa: PTH116 - twice per batch, and a Path costs three times as much
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


_POOLS: WeakSet[Connections] = WeakSet()
_INHERITED: list[_Handle] = []
"""Connections of a parent process. This process never uses or closes them, also not when their store is closed."""
_forking: dict[int, list[tuple[Connections, bool]]] = {}
"""By thread: the stores that are blocked while it forks. Strong references, so that none is collected meanwhile."""


def _before_fork() -> None:
    _forking[threading.get_ident()] = [(pool, pool.before_fork()) for pool in list(_POOLS)]


def _after_fork_in_parent() -> None:
    for pool, held in _forking.pop(threading.get_ident(), []):
        pool.after_fork_in_parent(held)


def _after_fork_in_child() -> None:
    for pool, _ in _forking.pop(threading.get_ident(), []):
        pool.after_fork_in_child()
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
