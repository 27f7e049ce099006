"""Sends packets, and sends one again whose transaction was rolled back."""

from __future__ import annotations

import logging
import time
from typing import Any

import pymysql

from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.mysql import address
from oncekey.stores.mysql.connection import (
    LOST_RACE,
    NOTHING_DONE,
    Connection,
    check_options,
    code_of,
    connect,
    explain,
)
from oncekey.stores.mysql.packets import filled
from oncekey.stores.sql.connections import Connections

_TRIES = 5

_log = logging.getLogger("oncekey")


class LostRace(Exception):
    """A rival inserted one of our keys at the same moment."""


class Sessions(Connections[Connection]):
    """A part of :class:`oncekey.stores.mysql.store.MysqlStore`."""

    driver_error = pymysql.Error

    def __init__(self, url: str, *, timeout: float, lock_timeout: float) -> None:
        super().__init__(url, timeout=timeout, lock_timeout=lock_timeout)
        self._address = address.parse(url)
        check_options(self._address)
        if self._address.ignored:
            _log.warning(
                "the MySQL URL has options of the app's own connections, which have no effect on oncekey's: %s",
                ", ".join(self._address.ignored),
            )
        self._where = self._address.where

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
            if gone or connection.closed:
                self.disconnect()
            else:
                connection.rollback()
        except pymysql.Error:
            self.disconnect()

    def _connect(self, deadline: float) -> Connection:
        try:
            return connect(self._address, timeout=self.timeout, lock_timeout=self.lock_timeout, deadline=deadline)
        except pymysql.Error as error:
            raise explain(error, self._where) from error
