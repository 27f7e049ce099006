"""The proxy's thread. It owns every socket: it accepts, forwards, holds bytes back and cuts.

``proxy.py`` gives it commands.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from oncekey.testing.proxy_links import Cut, Direction, Link, Pipe
from oncekey.testing.servers import HOST, free_port

_CHUNK: Final = 65536
_HELD: Final = 4 * _CHUNK  # bytes that one direction of one connection may hold before its sender waits
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST
_COMMAND_SECONDS: Final = 10.0


class ProxyThread:
    """Listens on a loopback port and forwards to ``target``. It starts in the mode ``pass_through``."""

    def __init__(self, target: tuple[str, int], max_connections: int) -> None:
        self.target = target
        self.host = HOST
        self._limit = max_connections
        self._selector = selectors.DefaultSelector()
        self._links: set[Link] = set()
        self._draining: set[socket.socket] = set()
        self._cuts: list[Cut] = []
        self._delay = 0.0
        self._hung: frozenset[Direction] = frozenset()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._running = True
        self._listener: socket.socket | None = None
        self.port = self._first_listen()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"tcp-proxy-{self.port}", daemon=True)

    # ------------------------------------------------------------ called by other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._links)

    def set_mode(self, *, delay: float = 0.0, hung: frozenset[Direction] = frozenset(), listen: bool = True) -> None:
        def change() -> None:
            self._delay, self._hung = delay, hung
            if not delay:
                for link in self._links:
                    link.up.hurry()
                    link.down.hurry()
            if listen:
                self._listen()
            else:
                self._stop_listening()
                self._cut_all()

        self._do(change)

    def cut_all(self) -> None:
        self._do(self._cut_all)

    def add(self, cut: Cut) -> None:
        self._do(lambda: self._cuts.append(cut))

    def close(self) -> None:
        if self._thread.is_alive():
            self._do(self._finish)
            self._thread.join(_COMMAND_SECONDS)

    def _do(self, command: Callable[[], None]) -> None:
        """Let the thread run the command, and return when it has."""
        if not self._thread.is_alive():
            raise RuntimeError("this proxy is closed: make a new one")
        done: Future[None] = Future()
        self._commands.append((command, done))
        self._wake_out.send(b"!")
        done.result(_COMMAND_SECONDS)

    # ------------------------------------------------------------ the thread

    def _run_commands(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(_CHUNK)
        while self._commands:
            command, done = self._commands.popleft()
            try:
                command()
            except Exception as error:  # noqa: BLE001 - _do() raises it
                done.set_exception(error)
            else:
                done.set_result(None)
        for link in list(self._links):
            self._step(link)

    def _finish(self) -> None:
        self._running = False
        self._stop_listening()
        self._cut_all()
        while self._draining:
            self._drop(self._draining.pop())

    def _run(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(self._patience()):
                    self._handle(key)
                self._flush_due()
        finally:
            self._finish()
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _patience(self) -> float | None:
        """How long to sleep: until the next held bytes are due."""
        due = [
            pipe.held[0][0]
            for link in self._links
            for pipe in link.pipes
            if pipe.held and link.connected and not pipe.blocked and pipe.direction not in self._hung
        ]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._wake_in:
            self._run_commands()
        elif key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, Link):
            if key.data in self._links:  # else an earlier event of this round closed it
                self._step(key.data, readable=key.fileobj)
        elif key.data == "drain":
            self._drain(key.fileobj)

    def _flush_due(self) -> None:
        for link in list(self._links):
            if link.up.held or link.down.held:
                self._step(link)

    # -- listening

    def _first_listen(self) -> int:
        for _ in range(20):
            self.port = free_port()
            with contextlib.suppress(OSError):
                self._listen()
                return self.port
        raise RuntimeError("no loopback port could be listened on: end what holds them, and try again")

    def _listen(self) -> None:
        if self._listener is None:
            listener = socket.socket()
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.host, self.port))
                listener.listen(128)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
            self._listener = listener
        self._watch(self._listener, selectors.EVENT_READ if len(self._links) < self._limit else 0, None)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._drop(self._listener)
            self._listener = None

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            client, _ = self._listener.accept()
        except OSError:  # the client has left
            return
        client.setblocking(False)
        server = socket.socket()
        server.setblocking(False)
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(client, server)
        self._links.add(link)
        self._listen()
        if server.connect_ex(self.target) not in (0, errno.EINPROGRESS):
            self._reset(link)
        else:
            self._step(link)

    # -- forwarding

    def _step(self, link: Link, *, readable: object = None) -> None:
        """Connect, read and write as far as possible, then register what the connection waits for."""
        try:
            self._connect(link)
            for pipe in link.pipes:
                if pipe.source is readable and self._may_read(link, pipe):
                    self._read(link, pipe)
                if link not in self._links:
                    return
                if link.connected and pipe.direction not in self._hung:
                    pipe.flush(time.monotonic())
            self._settle(link)
        except OSError:  # one side is closed, so close the other
            self._reset(link)

    def _connect(self, link: Link) -> None:
        if not link.connected:
            if failed := link.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failed, "the target did not accept")
            with contextlib.suppress(OSError):
                link.server.getpeername()
                link.connected = True

    def _may_read(self, link: Link, pipe: Pipe) -> bool:
        ready = link.connected or pipe is link.up
        return ready and not pipe.ended and pipe.size < _HELD and pipe.direction not in self._hung

    def _read(self, link: Link, pipe: Pipe) -> None:
        try:
            chunk = pipe.source.recv(_CHUNK)
        except BlockingIOError:
            return
        if link.doom is not None and link.doom.direction == "to_server" and pipe is link.down and not link.up.held:
            self._lose_answer(link, link.doom)
            return
        if not chunk:
            pipe.ended = True
            return
        cut = self._match(pipe, chunk)
        pipe.tail = (pipe.tail + chunk)[-1024:]
        if cut is not None and cut.when == "before":
            with cut.striking():
                self._reset(link)
            return
        link.doom = cut or link.doom
        pipe.push(time.monotonic() + self._delay, chunk)

    def _match(self, pipe: Pipe, chunk: bytes) -> Cut | None:
        for cut in self._cuts:
            if cut.left > 0 and cut.direction == pipe.direction and cut.matches(pipe.tail, chunk):
                cut.left -= 1
                return cut
        return None

    def _lose_answer(self, link: Link, cut: Cut) -> None:
        """The server has begun to answer: reset the client, and let the server end without an error."""
        with cut.striking():
            self._forget(link)
            self._drop(link.client, reset=True)
            with contextlib.suppress(OSError):
                link.server.shutdown(socket.SHUT_WR)
            self._draining.add(link.server)
            self._watch(link.server, selectors.EVENT_READ, "drain")

    def _drain(self, sock: object) -> None:
        if not isinstance(sock, socket.socket) or sock not in self._draining:
            return
        try:
            while sock.recv(_CHUNK):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self._draining.discard(sock)
        self._drop(sock)

    def _settle(self, link: Link) -> None:
        """Close the connection if it is over or its cut is due. Otherwise watch its sockets."""
        if link.doom is not None and link.doom.direction == "to_client" and not link.down.held:
            with link.doom.striking():
                self._close(link)
        elif link.up.closed and link.down.closed:
            self._close(link)
        else:
            self._watch(link.client, self._events(link, link.up, link.down), link)
            self._watch(link.server, self._events(link, link.down, link.up), link)

    def _events(self, link: Link, reads: Pipe, writes: Pipe) -> int:
        """What one socket waits for: it is the source of one pipe and the sink of the other."""
        events = selectors.EVENT_READ if self._may_read(link, reads) else 0
        if not link.connected:
            return events | (selectors.EVENT_WRITE if writes.sink is link.server else 0)
        if writes.blocked and writes.direction not in self._hung:
            events |= selectors.EVENT_WRITE
        return events

    def _watch(self, sock: socket.socket, events: int, data: object) -> None:
        known = self._selector.get_map().get(sock)
        if known is None and events:
            self._selector.register(sock, events, data)
        elif known is not None and not events:
            self._selector.unregister(sock)
        elif known is not None and (known.events != events or known.data is not data):
            self._selector.modify(sock, events, data)

    # -- ending

    def _forget(self, link: Link) -> None:
        self._links.discard(link)
        if self._listener is not None:
            self._listen()  # there may be room again

    def _close(self, link: Link) -> None:
        self._forget(link)
        self._drop(link.client)
        self._drop(link.server)

    def _reset(self, link: Link) -> None:
        self._forget(link)
        self._drop(link.client, reset=True)
        self._drop(link.server, reset=True)

    def _cut_all(self) -> None:
        for link in list(self._links):
            self._reset(link)
        while self._listener is not None:  # connections that were not accepted yet are open too
            try:
                waiting, _ = self._listener.accept()
            except OSError:
                return
            self._drop(waiting, reset=True)

    def _drop(self, sock: socket.socket, *, reset: bool = False) -> None:
        self._watch(sock, 0, None)
        if reset:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()
