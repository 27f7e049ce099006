"""A TCP proxy that misbehaves on demand: it is slow, hangs, refuses, or cuts the connection at a chosen byte.

This module makes the network faults of the tests, because the kernel's own (netem) is rarely available. Put the
proxy between a driver and a server, and change its mode while requests run::

    with TcpProxy("127.0.0.1", server.port) as proxy:
        url = proxy.rewrite(server.url)
        cut = proxy.cut_on("to_server", b"COMMIT", when="after")   # it commits, and the answer is lost
        ...
        assert cut.wait(5)

One thread owns every socket. The methods give it a command and return when the command is done. So when
``cut()`` returns, the connections are reset, and after ``close()`` there is no thread and no socket left.

A mode applies to all connections, old and new, until the next one is set:

- ``pass_through()``: forward at once.
- ``delay(seconds)``: every byte arrives that much later, in either direction; nothing is lost or reordered.
- ``hang(direction)``: the network is down. Connections are accepted and stay open, but bytes and closings do not
  arrive. Held bytes arrive when the mode changes, as after a network partition; ``cut()`` loses them.
- ``refuse()``: the port is closed, and open connections are reset.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from oncekey.testing.proxy_links import Cut, Direction, When
from oncekey.testing.proxy_thread import ProxyThread


class TcpProxy:
    """Listens on a loopback port and forwards to ``host:port``. See the module's docstring for the modes."""

    def __init__(self, host: str, port: int, *, max_connections: int = 256) -> None:
        self.target = (host, port)
        self._thread = ProxyThread(self.target, max_connections)
        self.host, self.port = self._thread.host, self._thread.port
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """How many client connections are open now."""
        return self._thread.connections

    def rewrite(self, url: str) -> str:
        """The same URL, through the proxy."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self.host}:{self.port}"))

    def pass_through(self) -> None:
        """Forward at once again, and send all held bytes."""
        self._thread.set_mode()

    def delay(self, seconds: float) -> None:
        """From now on every byte takes this much longer, in either direction."""
        self._thread.set_mode(delay=seconds)

    def hang(self, direction: Direction | None = None) -> None:
        """Forward nothing, in one direction or in both."""
        self._thread.set_mode(hung=frozenset({direction} if direction else {"to_server", "to_client"}))

    def refuse(self) -> None:
        """Close the listener and reset open connections, until another mode is set."""
        self._thread.set_mode(listen=False)

    def cut(self) -> None:
        """Reset every open connection now, on both sides. The mode stays for new ones."""
        self._thread.cut_all()

    def cut_on(
        self,
        direction: Direction,
        pattern: bytes | Callable[[bytes], bool],
        *,
        when: When = "before",
        times: int = 1,
    ) -> Cut:
        """Cut the connection on which these bytes pass, the first ``times`` times that they do.

        ``before``: the chunk with these bytes is dropped, and both sides are reset. ``after``, to the server:
        the bytes arrive, and the client's side is reset when the server begins to answer. So the server has
        acted, and the client cannot know. ``after``, to the client: the answer arrives, then both sides close.
        ``pattern`` may be a function. It is called with each chunk as received, in the proxy's thread.
        """
        if pattern == b"":
            raise ValueError("an empty pattern matches nothing that could be cut: give the bytes to wait for")
        cut = Cut(direction, pattern, when, times)
        self._thread.add(cut)
        return cut

    def close(self) -> None:
        """Reset open connections and end the thread. Safe to call twice."""
        self._thread.close()
