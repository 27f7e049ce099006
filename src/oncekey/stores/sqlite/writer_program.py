"""The program of SQLite's writer process. It opens one file, commits batches, and ends with the app that started it.

The app starts it by the path of this file, with ``python -I -S``: it imports only the standard library, never oncekey,
so it starts in a few hundredths of a second and no module of the app's folder gets in its way. Everything that it
must know comes over the socket on its standard input. ``writer_process.py`` is the other end.

==============  ==================================================================================================
settings        the app sends them first: a length, and JSON
batch           the app sends it: a time, three lengths, and the three texts that ``batch.sql`` takes
answer          the program sends it **after the commit**: the number of changed rows, or SQLite's error code as a
                negative number; a length, and a text. The first answer says that the file is open: its text has the
                ids of the file and of its write-ahead log
==============  ==================================================================================================

It ends at the end of the socket, and by SIGKILL when the app's process is gone (Linux). It ignores SIGINT, SIGTERM and
SIGHUP. They are for the app, which still has responses to store.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import sys
from contextlib import closing, suppress
from typing import Any, BinaryIO

SETTINGS = struct.Struct("!I")
BATCH = struct.Struct("!dIII")
ANSWER = struct.Struct("!iI")
SOCKET = 0
"""The app gives its socket as standard input: no number to pass, and no other file is inherited."""

_SET_DEATH_SIGNAL = 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with(int(sys.argv[1]))
    requests = open(SOCKET, "rb", closefd=False)  # noqa: SIM115 - it ends with the process
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the app is gone
        (length,) = SETTINGS.unpack(exactly(requests, SETTINGS.size))
        serve(requests, json.loads(exactly(requests, length)))
    os._exit(0)  # nothing is left to clean up, and the app may be waiting


def end_with(app: int) -> None:
    """Have the kernel kill this process when the app's is gone, also if another process keeps the socket open."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != app:
        os._exit(0)  # the app died before the line above


def serve(requests: BinaryIO, settings: dict[str, Any]) -> None:
    """Open the file, say so, and commit batch after batch, until the socket ends (EOFError)."""
    try:
        connection = opened(settings)
        ids = [file_id(bytes.fromhex(path)) for path in settings["files"]]
    except (sqlite3.Error, OSError) as error:
        answer(-code(error), str(error))
        return
    answer(0, json.dumps(ids))
    with closing(connection):  # the last connection to a file folds its log into it
        while True:
            now, *lengths = BATCH.unpack(exactly(requests, BATCH.size))
            ends, begins, pieces = (exactly(requests, length) for length in lengths)
            before = connection.total_changes  # also counts changes by triggers
            try:
                commit(connection, settings["apply"], (ends.decode(), begins.decode(), pieces, now))
            except sqlite3.Error as error:
                answer(-code(error), str(error))
            else:
                answer(connection.total_changes - before, "")


def exactly(requests: BinaryIO, size: int) -> bytes:
    """So many bytes, or EOFError. An app that is killed while it sends leaves a part of a batch, and a response of
    which the end is missing must not be stored."""
    data = requests.read(size)
    if len(data) < size:
        raise EOFError
    return data


def opened(settings: dict[str, Any]) -> sqlite3.Connection:
    """The URI has ``mode=rw``: a file that is gone is not created again."""
    connection = sqlite3.connect(settings["uri"], timeout=settings["lock_seconds"], isolation_level=None, uri=True)
    for statement in settings["prepare"]:
        connection.execute(statement)
    return connection


def commit(connection: sqlite3.Connection, statement: str, parameters: tuple[object, ...]) -> None:
    """One statement outside of a transaction: it is committed, and on the disk, when this returns."""
    connection.execute(statement, parameters)


def answer(number: int, text: str) -> None:
    said = text.encode(errors="replace")
    left = memoryview(ANSWER.pack(number, len(said)) + said)
    while left:
        left = left[os.write(SOCKET, left) :]


def code(error: Exception) -> int:
    """The primary code of SQLite's extended error code; SQLITE_ERROR if another part raised it."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF or sqlite3.SQLITE_ERROR


def file_id(path: bytes) -> tuple[int, int]:
    stat = os.stat(path)  # noqa: PTH116 - a Path takes no bytes
    return stat.st_dev, stat.st_ino


if __name__ == "__main__":
    main()
