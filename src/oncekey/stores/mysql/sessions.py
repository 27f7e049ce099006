"""The connections of a store: one for each thread and process, each verb under one deadline."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pymysql

from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.mysql import address
from oncekey.stores.mysql.connection import LOST_RACE, NOTHING_DONE, Connection, code_of, connect, explain
from oncekey.stores.mysql.packets import filled

_TRIES = 5


class LostRace(Exception):
    """A rival inserted one of our keys at the same moment."""


class Sessions:
    """A part of :class:`oncekey.stores.mysql.store.MysqlStore`."""

    def __init__(self, url: str, *, timeout: float, lock_timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.lock_timeout = lock_timeout
        self._address = address.parse(url)
        self._where = self._address.where
        self._local = threading.local()
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._inherited: list[Connection] = []
        self._pid = os.getpid()

    def _check(self, connection: Connection) -> None:
        raise NotImplementedError

    def _send(self, text: str, **values: Any) -> list[Any]:
        """Send one packet, and return the result of each statement in it: rows, or how many rows it matched.

        A deadlock rolls the whole transaction back, also at COMMIT, so the packet is sent again, before the deadline.
        """
        return self._packet(filled(text, values))

    def _packet(self, packet: str, *, checked: bool = True) -> list[Any]:
        for left in reversed(range(_TRIES)):
            connection = self._connection(checked=checked)
            if len(packet) >= connection.max_packet:  # the server would close the connection
                raise StoreError(
                    f"{self._where} takes packets of up to {connection.max_packet} bytes (max_allowed_packet), and "
                    f"this one has {len(packet)}: raise that setting"
                )
            try:
                return connection.run(packet)
            except pymysql.Error as error:
                code = code_of(error)
                self._after_error(connection, error)
                if code == LOST_RACE:
                    raise LostRace from error
                if code in NOTHING_DONE and left and time.monotonic() < self._local.deadline:
                    continue
                raise explain(error, self._where) from error
        raise AssertionError("unreachable")

    def _after_error(self, connection: Connection, error: pymysql.Error) -> None:
        """Roll back, or drop a connection that may still get an answer. The next packet must not read it as its own."""
        gone = isinstance(explain(error, self._where), StoreUnavailable) and code_of(error) not in NOTHING_DONE
        try:
            if gone or not connection.alive:
                self.disconnect()
            else:
                connection.rollback()
        except pymysql.Error:
            self.disconnect()

    def _start_clock(self) -> None:
        """A verb begins: all its round trips, including the connect, share one deadline."""
        self._local.deadline = time.monotonic() + self.timeout

    def _connection(self, *, checked: bool = True) -> Connection:
        """This thread's connection, under the deadline of the verb that asks for it."""
        local = self._local
        if getattr(local, "pid", None) != os.getpid():
            self._after_fork()
            local.connection, local.checked, local.pid = None, False, os.getpid()
            self._start_clock()
        connection: Connection | None = local.connection
        if connection is None or not connection.alive:
            try:
                connection = connect(
                    self._address, timeout=self.timeout, lock_timeout=self.lock_timeout, deadline=local.deadline
                )
            except pymysql.Error as error:
                raise explain(error, self._where) from error
            local.connection, local.checked = connection, False
            self._open.add(connection)
        connection.set_deadline(local.deadline)
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
        connection: Connection | None = getattr(local, "connection", None)
        if connection is not None and local.pid == os.getpid():
            _close(connection)
        local.connection, local.checked = None, False

    def close(self) -> None:
        if self._pid == os.getpid():
            for connection in list(self._open):
                _close(connection)


def _close(connection: Connection) -> None:
    with suppress(pymysql.Error, OSError, ValueError):
        connection.set_deadline(time.monotonic() + 0.1)
        connection.close()
