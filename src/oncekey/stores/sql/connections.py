"""The connections of a store on a server: one for each thread and process, each verb under one deadline."""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import abstractmethod
from contextlib import suppress
from typing import ClassVar, Generic, Protocol, TypeVar


class _Connection(Protocol):
    deadline: float
    """Every wait for the server ends about then, a time.monotonic()."""

    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...


_Own = TypeVar("_Own", bound=_Connection)


class Connections(Generic[_Own]):
    """A part of the store, which opens a connection in its own way, and checks the schema behind it."""

    driver_error: ClassVar[type[Exception]]

    def __init__(self, url: str, *, timeout: float, lock_timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.lock_timeout = lock_timeout
        self._local = threading.local()
        self._open: weakref.WeakSet[_Own] = weakref.WeakSet()
        self._inherited: list[_Own] = []
        self._pid = os.getpid()

    @abstractmethod
    def _connect(self, deadline: float) -> _Own: ...

    @abstractmethod
    def _check(self, connection: _Own) -> None:
        """Set ``_local.checked``, or raise SchemaError."""

    def _start_clock(self) -> None:
        """A verb begins: all its round trips, including the connect, share one deadline."""
        self._local.deadline = time.monotonic() + self.timeout

    def _connection(self, *, checked: bool = True) -> _Own:
        """This thread's connection, under the deadline of the verb that asks for it."""
        local = self._local
        if getattr(local, "pid", None) != os.getpid():
            self._after_fork()
            local.connection, local.checked, local.pid = None, False, os.getpid()
            self._start_clock()
        connection: _Own | None = local.connection
        if connection is None or connection.closed:
            connection = self._connect(local.deadline)
            local.connection, local.checked = connection, False
            self._open.add(connection)
        connection.deadline = local.deadline
        if checked and not local.checked:
            self._check(connection)
        return connection

    def _after_fork(self) -> None:
        """A forked child inherits the parent's sockets. It keeps references to them, and never uses or closes them."""
        if self._pid != os.getpid():
            self._inherited = list(self._open)
            self._open = weakref.WeakSet()
            self._pid = os.getpid()

    def disconnect(self) -> None:
        local = self._local
        connection: _Own | None = getattr(local, "connection", None)
        if connection is not None and local.pid == os.getpid():
            with suppress(self.driver_error):
                connection.close()
        local.connection, local.checked = None, False

    def close(self) -> None:
        if self._pid == os.getpid():
            for connection in list(self._open):
                with suppress(self.driver_error):
                    connection.close()
