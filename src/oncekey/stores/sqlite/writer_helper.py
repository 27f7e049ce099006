"""One writer process, as the app sees it: its start, one batch at a time, and its death.

:class:`Helper` has the gate of the file while a batch is under way, and gives it back exactly once: with the answer, or
when the kernel says that the process has ended. ``writer_process.py`` says when a process is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from oncekey.errors import StoreUnavailable
from oncekey.stores.sqlite import batch as batches
from oncekey.stores.sqlite.connections import SETTINGS as SETTINGS_OF_A_CONNECTION
from oncekey.stores.sqlite.connections import FileId
from oncekey.stores.sqlite.writer_program import ANSWER, BATCH, SETTINGS

if TYPE_CHECKING:
    from oncekey.stores.sqlite.batch import Packed
    from oncekey.stores.sqlite.store import SqliteStore

PROGRAM = os.path.join(os.path.dirname(__file__), "writer_program.py")  # noqa: PTH118, PTH120 - used as text
START_SECONDS = 10.0
"""A process that has not opened the file by then is killed."""
CLOSE_SECONDS = 2.0
"""How long close() waits for the process to end by itself."""


class Helper:
    """One process, from its start to its death."""

    def __init__(
        self, store: SqliteStore, known: FileId | None, lock_seconds: float, failed: Callable[[str], None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._gate = store.gate
        self._path = store.path
        self._known = known
        self._failed = failed
        self.files: tuple[FileId, FileId] | None = None
        """The ids of the file and of its log, as the process opened them. None: it is still starting."""
        self.over = False
        """No batch may be sent any more."""
        self.dead = False
        """The kernel says that the process has ended."""
        self._buffer = b""
        self._answer: asyncio.Future[tuple[int, str]] | None = None
        self._lock = threading.Lock()  # for the two fields ``dead`` and ``_holds_gate``
        self._holds_gate = False
        self.socket, self.process = start(store, lock_seconds)
        self.socket.setblocking(False)
        self.loop.add_reader(self.socket, self._readable)
        self._late = self.loop.call_later(
            START_SECONDS, self._lost, f"did not open the file within {START_SECONDS:g} s"
        )

    @property
    def opened(self) -> tuple[FileId, FileId]:
        assert self.files is not None  # noqa: S101 - asked only after an answer
        return self.files

    def take_gate(self) -> bool:
        """From now on the gate is given back by the answer, or by the death of the process. False: it is dead."""
        with self._lock:
            self._holds_gate = not (self.dead or self.over)
            return self._holds_gate

    async def ask(self, now: float, packed: Packed) -> tuple[int, str]:
        """Send a batch and wait for the answer. After ``take_gate``."""
        answer: asyncio.Future[tuple[int, str]] = self.loop.create_future()
        self._answer = answer
        try:
            await self._send(message(now, packed))
            return await answer
        except OSError as error:
            raise self._unknown() from error
        finally:
            self._answer = None
            if answer.done() and not answer.cancelled() and not self.over:
                self._give_gate_back()
            else:
                self.kill()  # it may commit the batch, now or later

    async def _send(self, data: bytes) -> None:
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            await self.loop.sock_sendall(self.socket, memoryview(data)[sent:])

    def _readable(self) -> None:
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(f"ended ({_ending(self.process)})")
            return
        self._buffer += data
        if len(self._buffer) < ANSWER.size:
            return
        number, length = ANSWER.unpack_from(self._buffer)
        if len(self._buffer) < ANSWER.size + length:
            return
        text, self._buffer = self._buffer[ANSWER.size :].decode(), b""
        if self.files is None:
            self._open(number, text)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result((number, text))

    def _open(self, number: int, text: str) -> None:
        self._late.cancel()
        if number < 0:
            self._lost(f"cannot open the file: {text}")
            return
        file, log = (tuple(each) for each in json.loads(text))
        if file != self._known:
            self._lost("found another file in its place")
            return
        self.files = file, log

    def _lost(self, why: str) -> None:
        """The process is gone, or of no use."""
        if not self.over:
            self.kill()
            self._failed(why)

    def _unknown(self) -> StoreUnavailable:
        return StoreUnavailable(f"the writer process of {self._path} died, and may have committed the batch before")

    def kill(self) -> None:
        """Kill the process. The gate is given back when it is dead, in a thread: a hung disk can delay its death."""
        if not self.over:
            self._leave()
            self._end()

    def close(self) -> None:
        """Let the process end by itself, and wait for it. A batch that is under way is cut off."""
        if self.over:
            return
        self._leave()
        if self._holds_gate:
            self.process.kill()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
        else:
            self._bury()

    def disown(self) -> None:
        """In a forked child. Closes a file, and nothing else: the loop's selector and the process are the parent's."""
        self.over = True
        self.process.returncode = 0  # otherwise Popen would wait for a process that is not a child of this one
        os.close(self.socket.detach())

    def _leave(self) -> None:
        """Take the socket from the loop and close it, from any thread."""
        self.over = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # the process sees the end now, whenever the loop runs
        if asyncio._get_running_loop() is self.loop:
            self._forget()
            return
        try:
            self.loop.call_soon_threadsafe(self._forget)
        except RuntimeError:  # the loop is closed
            self.socket.close()

    def _forget(self) -> None:
        self._late.cancel()
        self.loop.remove_reader(self.socket)
        self.socket.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._unknown())

    def _end(self) -> None:
        self.process.kill()
        try:
            threading.Thread(target=self._bury, name="oncekey-writer-end", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._bury()

    def _bury(self) -> None:
        self.process.wait()
        self._give_gate_back(dead=True)

    def _give_gate_back(self, *, dead: bool = False) -> None:
        with self._lock:
            self.dead = self.dead or dead
            held, self._holds_gate = self._holds_gate, False
        if held:
            self._gate.release()


def message(now: float, packed: Packed) -> bytes:
    ends, begins = packed.ends.encode(), packed.begins.encode()
    return b"".join((BATCH.pack(now, len(ends), len(begins), len(packed.bytes)), ends, begins, packed.bytes))


def start(store: SqliteStore, lock_seconds: float) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process, and send the settings. Does not wait until the file is open."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable or "", "-I", "-S", PROGRAM, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",  # keeps no other file system in use
                start_new_session=True,  # Ctrl-C in a terminal is for the app
            )
    except OSError:
        ours.close()
        raise
    said = json.dumps(settings(store, lock_seconds)).encode()
    with suppress(OSError):  # it has ended already, and the end of the socket says so
        ours.sendall(SETTINGS.pack(len(said)) + said)
    return ours, process


def trial(store: SqliteStore, lock_seconds: float) -> str | None:
    """Start a process, and end it as soon as it has opened the file. Why it did not, or None. Blocks."""
    try:
        connection, process = start(store, lock_seconds)
    except OSError as error:
        return f"could not be started ({error})"
    with process, connection:
        try:
            connection.settimeout(START_SECONDS)
            said = connection.recv(ANSWER.size, socket.MSG_WAITALL)
            if len(said) < ANSWER.size:
                return f"ended ({_ending(process)})"
            number, length = ANSWER.unpack(said)
            text = connection.recv(length, socket.MSG_WAITALL).decode()
            return f"cannot open the file: {text}" if number < 0 else None
        except TimeoutError:
            return f"did not open the file within {START_SECONDS:g} s"
        except ConnectionResetError:
            return f"ended ({_ending(process)})"
        finally:
            process.kill()


def settings(store: SqliteStore, lock_seconds: float) -> dict[str, object]:
    files = [os.fsencode(store.path), os.fsencode(f"{store.path}-wal")]
    return {
        "uri": f"{store.path.as_uri()}?mode=rw",
        "files": [path.hex() for path in files],  # JSON has no bytes, and a path need not be text
        "lock_seconds": lock_seconds,
        "prepare": [*SETTINGS_OF_A_CONNECTION, *batches.SCRIPT, "SELECT count(*) FROM sqlite_master"],
        "apply": batches.APPLY,
    }


def _ending(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(0.02)
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return "its socket is closed"
