"""The proxy passes bytes unchanged, and every fault does what its name says and nothing more."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer


class Echo(socketserver.ThreadingTCPServer):
    """Answers each line with itself, upper case, and remembers what it got and how each connection ended."""

    allow_reuse_address = True
    block_on_close = True

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.ends: list[str] = []
        self.ended = threading.Event()
        super().__init__(("127.0.0.1", 0), _EchoHandler)

    @property
    def port(self) -> int:
        return self.server_address[1]


class _EchoHandler(socketserver.StreamRequestHandler):
    server: Echo

    def handle(self) -> None:
        try:
            for line in self.rfile:
                self.server.lines.append(line)
                self.wfile.write(line.upper())
            self.server.ends.append("closed")
        except OSError as error:
            self.server.ends.append(errno.errorcode[error.errno or 0])
        self.server.ended.set()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", echo.port) as made:
        yield made


@contextlib.contextmanager
def connected(proxy: TcpProxy, timeout: float = 5.0) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout) as sock:
        yield sock


def ask(sock: socket.socket, line: bytes) -> bytes:
    sock.sendall(line)
    return receive(sock, len(line))


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly this many bytes, or fewer at the end."""
    got = b""
    while len(got) < size and (chunk := sock.recv(size - len(got))):
        got += chunk
    return got


def test_passes_bytes_both_ways_and_the_end_of_them(proxy: TcpProxy, echo: Echo) -> None:
    with connected(proxy) as sock:
        assert ask(sock, b"hello\n") == b"HELLO\n"
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(10) == b""
    assert echo.ends == ["closed"]


def test_passes_more_than_the_buffers_hold_unchanged(proxy: TcpProxy) -> None:
    sent = b"".join(b"%0999d\n" % number for number in range(16_000))
    with connected(proxy, 20) as sock:
        writer = threading.Thread(target=sock.sendall, args=(sent,))
        writer.start()
        time.sleep(0.05)  # let it run into back pressure before the first byte is read
        got = receive(sock, len(sent))
        writer.join()
    assert got == sent


def test_delay_makes_each_way_slower_and_ends_with_the_mode(proxy: TcpProxy) -> None:
    with connected(proxy) as sock:
        proxy.delay(0.1)
        began = time.monotonic()
        assert ask(sock, b"slow\n") == b"SLOW\n"
        assert time.monotonic() - began >= 0.2
        proxy.delay(60)
        sock.sendall(b"late\n")
        time.sleep(0.05)
        proxy.pass_through()
        assert receive(sock, 5) == b"LATE\n"


def test_hang_takes_connections_and_holds_bytes_until_it_is_over(proxy: TcpProxy, echo: Echo) -> None:
    proxy.hang()
    with connected(proxy, 0.1) as sock:
        sock.sendall(b"held\n")
        with pytest.raises(TimeoutError):
            sock.recv(10)
        assert echo.lines == []
        proxy.pass_through()
        sock.settimeout(5)
        assert receive(sock, 5) == b"HELD\n"


def test_hang_in_one_direction_lets_the_other_through(proxy: TcpProxy, echo: Echo) -> None:
    with connected(proxy, 0.2) as sock:
        assert ask(sock, b"one\n") == b"ONE\n"
        proxy.hang("to_client")
        sock.sendall(b"two\n")
        with pytest.raises(TimeoutError):
            sock.recv(10)
    assert echo.lines == [b"one\n", b"two\n"]


def test_bytes_held_by_a_hang_are_lost_at_a_cut(proxy: TcpProxy, echo: Echo) -> None:
    proxy.hang()
    with connected(proxy) as sock:
        sock.sendall(b"lost\n")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    proxy.pass_through()
    with connected(proxy) as sock:
        assert ask(sock, b"next\n") == b"NEXT\n"
    assert echo.lines == [b"next\n"]


def test_refuse_resets_open_connections_and_refuses_new_ones(proxy: TcpProxy) -> None:
    with connected(proxy) as sock:
        assert ask(sock, b"hello\n") == b"HELLO\n"
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    with pytest.raises(ConnectionRefusedError), connected(proxy):
        pass
    proxy.pass_through()
    with connected(proxy) as sock:
        assert ask(sock, b"again\n") == b"AGAIN\n"


def test_cut_resets_both_sides(proxy: TcpProxy, echo: Echo) -> None:
    with connected(proxy) as one, connected(proxy) as two:
        for sock in (one, two):
            assert ask(sock, b"hello\n") == b"HELLO\n"
        assert proxy.connections == 2
        proxy.cut()
        assert proxy.connections == 0
        for sock in (one, two):
            with pytest.raises(ConnectionResetError):
                sock.recv(10)
    echo.shutdown()
    echo.server_close()  # waits for its handlers
    assert echo.ends == ["ECONNRESET", "ECONNRESET"]


def test_cut_before_keeps_the_bytes_from_the_server(proxy: TcpProxy, echo: Echo) -> None:
    cut = proxy.cut_on("to_server", b"COMMIT", when="before")
    with connected(proxy) as sock:
        assert ask(sock, b"insert\n") == b"INSERT\n"
        sock.sendall(b"COMMIT\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    assert (cut.wait(5), cut.struck) == (True, 1)
    with connected(proxy) as sock:  # it was for once
        assert ask(sock, b"COMMIT\n") == b"COMMIT\n"
    assert echo.lines == [b"insert\n", b"COMMIT\n"]


def test_cut_after_delivers_the_bytes_and_loses_the_answer(proxy: TcpProxy, echo: Echo) -> None:
    cut = proxy.cut_on("to_server", b"COMMIT", when="after")
    with connected(proxy) as sock:
        assert ask(sock, b"insert\n") == b"INSERT\n"
        sock.sendall(b"COMMIT\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    assert cut.wait(5)
    assert echo.lines == [b"insert\n", b"COMMIT\n"]
    assert echo.ended.wait(5)
    assert echo.ends == ["closed"]


def test_cut_on_the_answer_before_and_after_it_arrives(proxy: TcpProxy) -> None:
    before = proxy.cut_on("to_client", b"ONE", when="before")
    with connected(proxy) as sock:
        sock.sendall(b"one\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    after = proxy.cut_on("to_client", b"TWO", when="after")
    with connected(proxy) as sock:
        assert ask(sock, b"two\n") == b"TWO\n"
        assert sock.recv(10) == b""
    assert (before.struck, after.struck) == (1, 1)


def test_a_pattern_between_two_chunks_is_seen(proxy: TcpProxy, echo: Echo) -> None:
    cut = proxy.cut_on("to_server", b"COMMIT")
    with connected(proxy) as sock:
        assert ask(sock, b"x\n") == b"X\n"
        sock.sendall(b"COM")
        time.sleep(0.05)
        sock.sendall(b"MIT\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    assert cut.struck == 1
    assert echo.lines[1:] in ([], [b"COM"])


def test_a_function_decides_and_times_and_cancel_are_kept(proxy: TcpProxy) -> None:
    cut = proxy.cut_on("to_server", lambda chunk: chunk.startswith(b"bad"), times=3)
    for _ in range(2):
        with connected(proxy) as sock:
            assert ask(sock, b"good\n") == b"GOOD\n"
            sock.sendall(b"bad\n")
            with pytest.raises(ConnectionResetError):
                sock.recv(10)
    cut.cancel()
    with connected(proxy) as sock:
        assert ask(sock, b"bad\n") == b"BAD\n"
    assert cut.struck == 2


def test_an_empty_pattern_is_refused(proxy: TcpProxy) -> None:
    with pytest.raises(ValueError, match="empty pattern"):
        proxy.cut_on("to_server", b"")


def test_a_target_that_is_down_resets_the_client(proxy: TcpProxy, echo: Echo) -> None:
    echo.shutdown()
    echo.server_close()
    with pytest.raises(ConnectionResetError), connected(proxy) as sock:  # even while it connects
        sock.recv(10)


def test_connections_over_the_limit_wait_for_room(echo: Echo) -> None:
    with TcpProxy("127.0.0.1", echo.port, max_connections=1) as proxy, connected(proxy) as first:
        assert ask(first, b"one\n") == b"ONE\n"
        with connected(proxy, 0.1) as second:
            second.sendall(b"two\n")
            with pytest.raises(TimeoutError):
                second.recv(10)
            first.close()
            second.settimeout(5)
            assert receive(second, 4) == b"TWO\n"


def test_closed_it_leaves_no_thread_and_no_socket(echo: Echo) -> None:
    def sockets() -> int:
        return sum("socket:" in _target(entry) for entry in Path("/proc/self/fd").iterdir())

    threads, before = threading.active_count(), sockets()
    proxy = TcpProxy("127.0.0.1", echo.port)
    with connected(proxy) as sock:
        assert ask(sock, b"hello\n") == b"HELLO\n"
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionResetError):
            sock.recv(10)
    with pytest.raises(RuntimeError, match="closed"):
        proxy.cut()
    echo.shutdown()
    echo.server_close()
    assert threading.active_count() <= threads
    assert sockets() <= before


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def test_rewrite_keeps_all_of_a_url_but_the_address(proxy: TcpProxy) -> None:
    url = "postgresql://user:pass@db.example:5432/app?sslmode=disable"
    assert proxy.rewrite(url) == f"postgresql://user:pass@127.0.0.1:{proxy.port}/app?sslmode=disable"
    assert proxy.rewrite("redis://db.example/0") == f"redis://127.0.0.1:{proxy.port}/0"


@pytest.mark.parametrize(("when", "committed"), [("before", 0), ("after", 1)])
def test_a_commit_is_cut_before_or_after_postgresql_got_it(
    postgres_server: PostgresServer, postgres_url: str, when, committed: int
) -> None:
    psycopg = pytest.importorskip("psycopg")
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        with psycopg.connect(proxy.rewrite(postgres_url), autocommit=True) as connection:
            connection.execute("CREATE TABLE t (x int)")
        cut = proxy.cut_on("to_server", b"COMMIT", when=when)
        with (
            pytest.raises(psycopg.OperationalError),
            psycopg.connect(proxy.rewrite(postgres_url)) as connection,
        ):
            connection.execute("INSERT INTO t VALUES (1)")
        assert cut.struck == 1
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (committed,)
