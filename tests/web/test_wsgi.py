"""The WSGI middleware under apps and servers that use every corner of PEP 3333, driven by hand."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest

from oncekey import current
from oncekey.telemetry import events
from oncekey.testing.http.stack import SECONDS, until
from tests.web.wsgi_server import JSON, LARGE, Answer, MakeServer, Pieces, paid, returning


def test_both_sides_keep_the_protocol(make_server: MakeServer) -> None:
    """The standard library's checker finds nothing wrong between server and us, nor between us and the app."""
    server = make_server(validator(paid))
    server.app = validator(server.app)
    first, second = server.post(), server.post()
    assert (first.status, first.body) == (second.status, second.body) == (201, b'{"id":"pay_1"}')
    assert first.headers["content-length"] == second.headers["content-length"] == "14"
    assert server.runs == 1


# ---------------------------------------------------------------- how a response is begun


def test_start_response_with_exc_info_replaces_the_response_and_counts_as_raised(make_server: MakeServer) -> None:
    """WSGI's way to put an error page in the place of a response says that the handler raised."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("201 Created", JSON)
        try:
            raise RuntimeError("after the charge")
        except RuntimeError:
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")], sys.exc_info())
        return [b"sorry"]

    server = make_server(app)
    answer = server.post()
    assert (answer.status, answer.body, answer.headers["content-type"]) == (500, b"sorry", "text/plain")
    assert answer.starts == 1
    assert server.state == "unknown"


def test_start_response_with_exc_info_after_the_headers_went_out_raises(make_server: MakeServer) -> None:
    """PEP 3333: a response whose headers are sent cannot be replaced, so the app gets its error back."""
    seen: list[BaseException] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield from LARGE
        try:
            raise RuntimeError("after the charge")
        except RuntimeError:
            try:
                start_response("500 Internal Server Error", JSON, sys.exc_info())
            except RuntimeError as error:
                seen.append(error)
                raise
        yield b"sorry"

    server = make_server(app)
    with pytest.raises(RuntimeError, match="after the charge"):
        server.post()
    assert len(seen) == 1
    assert server.state == "unknown"


def test_a_response_that_begins_with_its_first_piece(make_server: MakeServer) -> None:
    """A generator calls start_response only when it is asked for its first piece."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield b"one"
        yield b"two"

    server = make_server(app)
    first, second = server.post(), server.post()
    assert (first.status, first.body) == (second.status, second.body) == (201, b"onetwo")
    assert server.runs == 1


def test_legacy_write_comes_before_the_returned_body(make_server: MakeServer) -> None:
    """What is written in the old style is part of the body, in its order, and of the replay."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        write = start_response("201 Created", JSON)
        write(b"one,")
        write(b"two,")

        def rest() -> Iterator[bytes]:
            yield b"three,"
            write(b"four,")
            yield b"five"
            write(b",six")

        return rest()

    server = make_server(app)
    first, second = server.post(), server.post()
    assert first.body == second.body == b"one,two,three,four,five,six"
    assert first.headers["content-length"] == second.headers["content-length"] == "27"
    assert server.runs == 1


def test_an_app_that_only_writes(make_server: MakeServer) -> None:
    """The whole body may come through write(), with an empty iterable after it."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("201 Created", JSON)(b"all of it")
        return []

    server = make_server(app)
    first, second = server.post(), server.post()
    assert first.body == second.body == b"all of it"
    assert server.state == "completed"


def test_a_large_body_through_write_leaves_a_tombstone(make_server: MakeServer) -> None:
    """write() is no way around the limit, and the client still gets everything."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        write = start_response("201 Created", JSON)
        for piece in LARGE:
            write(piece)
        return []

    server = make_server(app)
    first, second = server.post(), server.post()
    assert first.body == b"".join(LARGE)
    assert b"body-not-kept" in second.body
    assert (server.runs, server.state) == (1, "completed")


@pytest.mark.parametrize("empty", [[], [b""], (), iter(()), Pieces()], ids=["list", "piece", "tuple", "iter", "close"])
def test_an_empty_iterable_is_an_empty_body(make_server: MakeServer, empty: Any) -> None:
    """An answer without a body is complete, has length 0, and replays so."""
    server = make_server(returning(empty))
    first, second = server.post(), server.post()
    assert (first.status, first.body, first.headers["content-length"]) == (201, b"", "0")
    assert (second.status, second.body, second.headers["content-length"]) == (201, b"", "0")
    assert (server.runs, server.state) == (1, "completed")


def test_app_that_never_starts_its_response_makes_the_key_unknown(make_server: MakeServer) -> None:
    """Whatever it did, it did not say: that is no answer to store, and the server hears of it."""
    server = make_server(lambda environ, start_response: [])
    with pytest.raises(EOFError, match="did not start"):
        server.post()
    assert server.state == "unknown"


# ---------------------------------------------------------------- file wrappers


def test_a_file_wrapper_is_no_way_around_the_store(make_server: MakeServer) -> None:
    """The app does not see the server's file wrapper, so what it sends passes by us and is stored."""

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        start_response("200 OK", JSON)
        return environ.get("wsgi.file_wrapper", FileWrapper)(io.BytesIO(b"the file"), 3)

    class ByKernel:
        """What a server would hand to sendfile without iterating it."""

        def __init__(self, *_: Any) -> None:
            raise AssertionError("the server's own wrapper was used")

    server = make_server(app)
    first = server.post(wsgi__file_wrapper=ByKernel)
    second = server.post(wsgi__file_wrapper=ByKernel)
    assert first.body == second.body == b"the file"
    assert server.runs == 1


def test_the_app_is_not_asked_to_compress(make_server: MakeServer) -> None:
    """Identity bytes are stored, since the next client may not take what this one does."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", JSON)
        return [environ.get("HTTP_ACCEPT_ENCODING", "identity").encode()]

    assert make_server(app).post(HTTP_ACCEPT_ENCODING="gzip").body == b"identity"


# ---------------------------------------------------------------- threads and context


def test_two_threads_with_one_key(make_server: MakeServer) -> None:
    """While one thread is in the handler, the other is told to come again; each sees only its own operation."""
    entered, go = threading.Event(), threading.Event()
    seen: list[str] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if current().key == "k-1":
            entered.set()
            assert go.wait(SECONDS)
        seen.append(current().key)
        return paid(environ, start_response)

    server = make_server(app)
    answers: list[Answer] = []
    first = threading.Thread(target=lambda: answers.append(server.post()))
    first.start()
    assert entered.wait(SECONDS)
    assert server.post().status == 409
    assert server.post("k-2").status == 201
    go.set()
    first.join(SECONDS)
    assert [answer.status for answer in answers] == [201]
    assert seen == ["k-2", "k-1"]
    assert server.post().headers["idempotency-replayed"] == "true"
    assert server.runs == 2


def test_a_generator_and_its_close_see_the_operation_and_the_thread_does_not(make_server: MakeServer) -> None:
    """All of the app's code runs in the request's context, also behind a stream, and nothing of it stays."""
    seen: list[str] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        try:
            for piece in LARGE:
                seen.append(current().key)
                yield piece
        finally:
            seen.append(f"closed {current().key}")

    server = make_server(app)
    _, iterable = server.begin()
    source = iter(iterable)
    next(source)
    with pytest.raises(LookupError):
        current()
    iterable.close()  # type: ignore[attr-defined]
    assert seen == ["k-1"] * len(LARGE) + ["closed k-1"]
    with pytest.raises(LookupError):
        current()


# ---------------------------------------------------------------- the store fails


def test_with_the_store_down_the_app_is_not_called(make_server: MakeServer) -> None:
    """503 with Retry-After; and after many failures in a row the store is not even asked for a while."""
    server = make_server(paid)
    server.store.down = {"reserve"}
    for _ in range(7):
        answer = server.post()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert server.runs == 0
    assert any(isinstance(event, events.BreakerOpened) for event in server.events)


def test_a_store_that_hangs_is_a_503_in_time(make_server: MakeServer) -> None:
    """A store that does not answer is given up after ``begin_timeout``, and what it reserved late is given back."""
    server = make_server(paid, begin_timeout=timedelta(seconds=1))  # the last request must begin within it
    hangs = threading.Event()
    reserve = server.store.reserve
    server.store.reserve = lambda batch: (hangs.wait(SECONDS), reserve(batch))[1]  # type: ignore[method-assign]
    assert server.post().status == 503
    assert server.runs == 0
    hangs.set()
    until(lambda: server.store._rows == {}, "the late reservation is given back")
    assert server.post().status == 201


def test_response_that_cannot_be_stored_is_503_and_stored_by_the_keeper(make_server: MakeServer) -> None:
    """The handler ran and its answer is not lost: the keeper goes on trying, by itself, and the retry gets it."""
    server = make_server(paid)
    server.store.down = {"swap"}
    answer = server.post()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert b"not-stored" in answer.body
    assert server.state == "in_progress"
    assert server.post().status == 409
    server.store.down = set()
    until(lambda: server.state == "completed", "the keeper stores it")
    retry = server.post()
    assert (retry.status, retry.body, retry.headers["idempotency-replayed"]) == (201, b'{"id":"pay_1"}', "true")
    assert server.runs == 1
    until(lambda: server.once.engine.keeper._live == {}, "the keeper lets go of it")


def test_closing_stores_unfinished_outcomes(make_server: MakeServer) -> None:
    """A graceful end is the last chance of an answer that waits for the store, and it is taken."""
    server = make_server(paid)
    server.store.down = {"swap"}
    assert server.post().status == 503
    server.once.engine.keeper._look_seconds = 600.0  # not by chance
    server.store.down = set()
    server.once.close()
    assert server.state == "completed"
