"""How a WSGI response ends: iterables that break, ``close()``, and clients that leave before the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncekey import NotExecuted
from oncekey.testing.http.stack import until
from tests.web.wsgi_server import JSON, LARGE, MakeServer, Pieces, returning

# ---------------------------------------------------------------- close()


def test_close_is_called_once_and_before_the_answer_goes_out(make_server: MakeServer) -> None:
    """A stored response is read to its end and closed, once, whatever the server does with what it gets."""
    pieces = Pieces(b"one", b"two")
    server = make_server(returning(pieces))
    answer, iterable = server.begin()
    assert pieces.closed == 1
    assert server.state == "completed"
    assert b"".join(iterable) == b"onetwo"
    getattr(iterable, "close", lambda: None)()
    assert (pieces.closed, answer.status) == (1, 201)


def test_close_is_called_once_when_a_large_response_has_passed(make_server: MakeServer) -> None:
    """What passes through is closed when the server closes it, and only then."""
    pieces = Pieces(*LARGE)
    server = make_server(returning(pieces))
    _, iterable = server.begin()
    assert b"".join(iterable) == b"".join(LARGE)
    assert pieces.closed == 0
    iterable.close()  # type: ignore[attr-defined]
    iterable.close()  # type: ignore[attr-defined]
    assert pieces.closed == 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_close_is_called_once_when_the_iterable_breaks(make_server: MakeServer, after: int) -> None:
    """An iterable that raises midway is closed once, the key is in doubt, and the server gets the error."""
    pieces = Pieces(b"one", b"two", fails_after=after)
    server = make_server(returning(pieces))
    with pytest.raises(RuntimeError, match="broke midway"):
        server.post()
    assert (pieces.closed, server.state) == (1, "unknown")


def test_large_iterable_that_breaks_midway_makes_the_key_unknown(make_server: MakeServer) -> None:
    """The client has seen a part and no end: nothing is stored, and the retry does not run."""
    pieces = Pieces(*LARGE, fails_after=8)
    server = make_server(returning(pieces))
    with pytest.raises(RuntimeError, match="broke midway"):
        server.post()
    assert (pieces.closed, server.state) == (1, "unknown")
    assert server.post().status == 409
    assert server.runs == 1


class Killed(BaseException):
    """As gevent ends a greenlet, and gunicorn a worker that took too long."""


@pytest.mark.parametrize("before", [1, 8], ids=["small", "streaming"])
def test_a_handler_that_is_killed_does_not_leave_the_key_stuck(make_server: MakeServer, before: int) -> None:
    """A BaseException ends the attempt, too: the keeper does not renew the lease of a handler that has ended."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield from LARGE[:before]
        raise Killed

    server = make_server(app)
    with pytest.raises(Killed):
        server.post()
    assert server.once.engine.keeper._live == {}
    assert server.state == "unknown"


def test_an_iterable_that_breaks_with_one_of_our_own_exceptions(make_server: MakeServer) -> None:
    """NotExecuted out of a generator is the handler's word as well: 503, and the key can be retried."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield b"a piece that is not sent"
        raise NotExecuted("the bank is closed")

    server = make_server(app)
    answer = server.post()
    assert (answer.status, answer.starts) == (503, 1)
    assert b"not sent" not in answer.body
    assert server.state == "failed_retryable"


def test_a_status_that_is_none_does_not_leave_the_key_stuck(make_server: MakeServer) -> None:
    """If the check came later, the attempt would never end, and its lease would be renewed for ever."""
    server = make_server(lambda environ, start_response: [start_response("OK", JSON), b"{}"][1:])
    with pytest.raises(ValueError, match="invalid literal"):
        server.post()
    assert server.state == "unknown"
    assert server.once.engine.keeper._live == {}


def test_a_close_that_raises_counts_as_raised(make_server: MakeServer) -> None:
    """What breaks while the response is let go may have undone it: nothing is stored as a success."""
    server = make_server(returning(Pieces(b"one", close_fails=True)))
    with pytest.raises(RuntimeError, match="close broke"):
        server.post()
    assert server.state == "unknown"


def test_a_close_that_raises_after_the_iterable_broke_does_not_leave_the_key_stuck(make_server: MakeServer) -> None:
    """Two failures in a row still end the attempt: the keeper stops renewing its lease."""
    server = make_server(returning(Pieces(b"one", fails_after=1, close_fails=True)))
    with pytest.raises(RuntimeError):
        server.post()
    assert server.once.engine.keeper._live == {}
    assert server.state == "unknown"


# ---------------------------------------------------------------- the client leaves


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_client_that_leaves_mid_stream_stops_nothing(make_server: MakeServer, taken: int) -> None:
    """The server closes early: the handler runs to its end, the key is completed (tombstone), close is called once."""
    pieces = Pieces(*LARGE)
    server = make_server(returning(pieces))
    _, iterable = server.begin()
    source = iter(iterable)
    for _ in range(taken):
        next(source)
    assert pieces.given < len(LARGE)
    assert server.state == "in_progress"
    iterable.close()  # type: ignore[attr-defined]
    assert (pieces.given, pieces.closed, server.state) == (len(LARGE), 1, "completed")
    retry = server.post()
    assert (retry.status, retry.headers["idempotency-replayed"]) == (201, "true")
    assert b"body-not-kept" in retry.body
    assert server.runs == 1


def test_a_handler_that_breaks_after_its_client_left(make_server: MakeServer) -> None:
    """Nobody is there to see the error, and the key still says that the outcome is not known."""
    pieces = Pieces(*LARGE, fails_after=9)
    server = make_server(returning(pieces))
    _, iterable = server.begin()
    with pytest.raises(RuntimeError, match="broke midway"):
        iterable.close()  # type: ignore[attr-defined]
    assert (pieces.closed, server.state) == (1, "unknown")


def test_the_end_of_a_stream_waits_for_the_store(make_server: MakeServer) -> None:
    """A client that has seen the last piece can rely on the key being completed."""
    server = make_server(returning(Pieces(*LARGE)))
    _, iterable = server.begin()
    source = iter(iterable)
    for _ in LARGE[1:]:
        next(source)
        assert server.state == "in_progress"
    next(source)
    assert server.state == "completed"
    iterable.close()  # type: ignore[attr-defined]


def test_the_end_of_a_stream_is_withheld_when_it_cannot_be_stored(make_server: MakeServer) -> None:
    """Without a stored tombstone the client does not see the end, so that it retries; the keeper stores it later."""
    server = make_server(returning(Pieces(*LARGE)))
    _, iterable = server.begin()
    server.store.down = {"swap"}
    got: list[bytes] = []
    with pytest.raises(RuntimeError, match="could not be stored"):
        got.extend(iterable)
    iterable.close()  # type: ignore[attr-defined]
    assert len(got) < len(LARGE)
    server.store.down = set()
    until(lambda: server.state == "completed", "the keeper stores the tombstone")
    assert b"body-not-kept" in server.post().body
    assert server.runs == 1
