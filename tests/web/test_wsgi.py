"""The WSGI middleware under apps and servers that use every corner of PEP 3333, driven by hand."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.record import Record
from oncekey.errors import ConfigurationError
from oncekey.telemetry import events
from oncekey.web.wsgi import IdempotencyMiddleware
from tests.web.frameworks import MAX_RESPONSE, ONE, SECONDS, FlakyStore, until

BODY = b'{"amount":1000}'
JSON = [("Content-Type", "application/json")]
App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class Answer:
    """What a server was told: the status, the headers, and the body so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.written: list[bytes] = []
        self.starts = 0

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        assert self.starts == 0 or exc_info is not None, "started twice"
        self.starts += 1
        self.status = int(status[:3])
        self.headers = {name.lower(): value for name, value in headers}
        return self.written.append


class Server:
    """The app behind our middleware, and the server in front of it."""

    def __init__(self, app: App, *, store: FlakyStore | None = None, scope: Any = SINGLE_TENANT, **policy: Any) -> None:
        self.runs = 0
        self.store = store or FlakyStore()
        self.events: list[events.Event] = []
        policy.setdefault("max_response_bytes", MAX_RESPONSE)
        self.once = OnceKey(self.store, scope=scope, policy=Policy(**policy), on_event=self.events.append)

        def counted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            self.runs += 1
            return app(environ, start_response)

        self.app: App = IdempotencyMiddleware(counted, self.once)

    def environ(self, key: str | None = "k-1", body: bytes = BODY, **changes: Any) -> dict[str, Any]:
        """A request as a server hands it over; None removes a name."""
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "POST",
            "SCRIPT_NAME": "",
            "PATH_INFO": "/payments",
            "QUERY_STRING": "",
            "SERVER_NAME": "api.test",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_IDEMPOTENCY_KEY": key,
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        environ |= {name.replace("__", "."): value for name, value in changes.items()}
        return {name: value for name, value in environ.items() if value is not None}

    def begin(self, key: str | None = "k-1", **changes: Any) -> tuple[Answer, Iterable[bytes]]:
        """Call the app, and leave the iterable to the test."""
        answer = Answer()
        return answer, self.app(self.environ(key, **changes), answer.start_response)

    def post(self, key: str | None = "k-1", **changes: Any) -> Answer:
        """One whole request, as a server does it: iterate to the end, then close."""
        answer, iterable = self.begin(key, **changes)
        try:
            for piece in iterable:
                assert answer.starts > 0, "a body before its start"
                answer.body += piece
        finally:
            if hasattr(iterable, "close"):
                iterable.close()
        return answer

    def record(self, key: str = "k-1") -> Record | None:
        return self.store.read([(ONE, key)])[0]

    @property
    def state(self) -> str | None:
        record = self.record()
        return record.state.value if record else None


@pytest.fixture
def make() -> Iterator[Callable[..., Server]]:
    """Makes protected apps; all of them are closed at the end."""
    made: list[Server] = []

    def make(app: App, **options: Any) -> Server:
        made.append(Server(app, **options))
        return made[-1]

    yield make
    for server in made:
        server.once.close()


Make = Callable[..., Server]


def paid(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("201 Created", [*JSON, ("Location", "/payments/1")])
    return [b'{"id":', b'"pay_1"}']


class Pieces:
    """An iterable that says what was done to it, and may fail on the way."""

    def __init__(self, *pieces: bytes, fails_after: int | None = None, close_fails: bool = False) -> None:
        self.pieces = list(pieces)
        self.given = 0
        self.closed = 0
        self._fails_after = fails_after
        self._close_fails = close_fails

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._fails_after == self.given:
            raise RuntimeError("broke midway")
        if self.given == len(self.pieces):
            raise StopIteration
        self.given += 1
        return self.pieces[self.given - 1]

    def close(self) -> None:
        self.closed += 1
        if self._close_fails:
            raise RuntimeError("close broke")


def returning(iterable: Any, status: str = "201 Created") -> App:
    """An app that answers with this very iterable."""

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        start_response(status, JSON)
        return iterable

    return app


LARGE = tuple(b"x" * 1000 for _ in range(10))


def test_both_sides_keep_the_protocol(make: Make) -> None:
    """The standard library's checker finds nothing wrong between server and us, nor between us and the app."""
    server = make(validator(paid))
    server.app = validator(server.app)
    first, second = server.post(), server.post()
    assert (first.status, first.body) == (second.status, second.body) == (201, b'{"id":"pay_1"}')
    assert first.headers["content-length"] == second.headers["content-length"] == "14"
    assert server.runs == 1


# ---------------------------------------------------------------- how a response is begun


def test_start_response_with_exc_info_replaces_the_response_and_counts_as_raised(make: Make) -> None:
    """WSGI's way to put an error page in the place of a response says that the handler raised."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        current().tells_apart = True  # as a framework's integration says: then a plain 500 would count as returned
        start_response("201 Created", JSON)
        try:
            raise RuntimeError("after the charge")
        except RuntimeError:
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")], sys.exc_info())
        return [b"sorry"]

    server = make(app)
    answer = server.post()
    assert (answer.status, answer.body, answer.headers["content-type"]) == (500, b"sorry", "text/plain")
    assert answer.starts == 1
    assert server.state == "unknown"


def test_start_response_with_exc_info_after_the_headers_went_out_raises(make: Make) -> None:
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

    server = make(app)
    with pytest.raises(RuntimeError, match="after the charge"):
        server.post()
    assert len(seen) == 1
    assert server.state == "unknown"


def test_a_response_that_begins_with_its_first_piece(make: Make) -> None:
    """A generator calls start_response only when it is asked for its first piece."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield b"one"
        yield b"two"

    server = make(app)
    first, second = server.post(), server.post()
    assert (first.status, first.body) == (second.status, second.body) == (201, b"onetwo")
    assert server.runs == 1


def test_the_legacy_write_comes_before_what_is_returned(make: Make) -> None:
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

    server = make(app)
    first, second = server.post(), server.post()
    assert first.body == second.body == b"one,two,three,four,five,six"
    assert first.headers["content-length"] == second.headers["content-length"] == "27"
    assert server.runs == 1


def test_an_app_that_only_writes(make: Make) -> None:
    """The whole body may come through write(), with an empty iterable after it."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("201 Created", JSON)(b"all of it")
        return []

    server = make(app)
    first, second = server.post(), server.post()
    assert first.body == second.body == b"all of it"
    assert server.state == "completed"


def test_a_large_body_through_write_leaves_a_tombstone(make: Make) -> None:
    """write() is no way around the limit, and the client still gets everything."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        write = start_response("201 Created", JSON)
        for piece in LARGE:
            write(piece)
        return []

    server = make(app)
    first, second = server.post(), server.post()
    assert first.body == b"".join(LARGE)
    assert b"body-not-kept" in second.body
    assert (server.runs, server.state) == (1, "completed")


@pytest.mark.parametrize("empty", [[], [b""], (), iter(()), Pieces()], ids=["list", "piece", "tuple", "iter", "close"])
def test_an_empty_iterable_is_an_empty_body(make: Make, empty: Any) -> None:
    """An answer without a body is complete, has length 0, and replays so."""
    server = make(returning(empty))
    first, second = server.post(), server.post()
    assert (first.status, first.body, first.headers["content-length"]) == (201, b"", "0")
    assert (second.status, second.body, second.headers["content-length"]) == (201, b"", "0")
    assert (server.runs, server.state) == (1, "completed")


def test_an_app_that_never_starts_its_response_has_not_said_how_it_ended(make: Make) -> None:
    """Whatever it did, it did not say: that is no answer to store, and the server hears of it."""
    server = make(lambda environ, start_response: [])
    with pytest.raises(EOFError, match="did not start"):
        server.post()
    assert server.state == "unknown"


# ---------------------------------------------------------------- close()


def test_close_is_called_once_and_before_the_answer_goes_out(make: Make) -> None:
    """A stored response is read to its end and closed, once, whatever the server does with what it gets."""
    pieces = Pieces(b"one", b"two")
    server = make(returning(pieces))
    answer, iterable = server.begin()
    assert pieces.closed == 1
    assert server.state == "completed"
    assert b"".join(iterable) == b"onetwo"
    getattr(iterable, "close", lambda: None)()
    assert (pieces.closed, answer.status) == (1, 201)


def test_close_is_called_once_when_a_large_response_has_passed(make: Make) -> None:
    """What passes through is closed when the server closes it, and only then."""
    pieces = Pieces(*LARGE)
    server = make(returning(pieces))
    _, iterable = server.begin()
    assert b"".join(iterable) == b"".join(LARGE)
    assert pieces.closed == 0
    iterable.close()  # type: ignore[attr-defined]
    iterable.close()  # type: ignore[attr-defined]
    assert pieces.closed == 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_close_is_called_once_when_the_iterable_breaks(make: Make, after: int) -> None:
    """An iterable that raises midway is closed once, the key is in doubt, and the server gets the error."""
    pieces = Pieces(b"one", b"two", fails_after=after)
    server = make(returning(pieces))
    with pytest.raises(RuntimeError, match="broke midway"):
        server.post()
    assert (pieces.closed, server.state) == (1, "unknown")


def test_a_large_iterable_that_breaks_midway_leaves_the_key_in_doubt(make: Make) -> None:
    """The client has seen a part and no end: nothing is stored, and the retry does not run."""
    pieces = Pieces(*LARGE, fails_after=8)
    server = make(returning(pieces))
    with pytest.raises(RuntimeError, match="broke midway"):
        server.post()
    assert (pieces.closed, server.state) == (1, "unknown")
    assert server.post().status == 409
    assert server.runs == 1


class Killed(BaseException):
    """As gevent ends a greenlet, and gunicorn a worker that took too long."""


@pytest.mark.parametrize("before", [1, 8], ids=["small", "streaming"])
def test_a_handler_that_is_killed_does_not_leave_the_key_stuck(make: Make, before: int) -> None:
    """What is no Exception ends the attempt all the same: nobody renews the lease of a handler that is gone."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield from LARGE[:before]
        raise Killed

    server = make(app)
    with pytest.raises(Killed):
        server.post()
    assert server.once.engine.keeper._live == {}
    assert server.state == "unknown"


def test_an_iterable_that_breaks_with_one_of_our_own_exceptions(make: Make) -> None:
    """NotExecuted out of a generator is the handler's word as well: 503, and the key can be retried."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("201 Created", JSON)
        yield b"a piece that nobody sees"
        raise NotExecuted("the bank is closed")

    server = make(app)
    answer = server.post()
    assert (answer.status, answer.starts) == (503, 1)
    assert b"nobody sees" not in answer.body
    assert server.state == "failed_retryable"


def test_a_close_that_raises_counts_as_raised(make: Make) -> None:
    """What breaks while the response is let go may have undone it: nothing is stored as a success."""
    server = make(returning(Pieces(b"one", close_fails=True)))
    with pytest.raises(RuntimeError, match="close broke"):
        server.post()
    assert server.state == "unknown"


def test_a_close_that_raises_after_the_iterable_broke_does_not_leave_the_key_stuck(make: Make) -> None:
    """Two failures in a row still end the attempt: nobody goes on renewing the lease of a handler that is gone."""
    server = make(returning(Pieces(b"one", fails_after=1, close_fails=True)))
    with pytest.raises(RuntimeError):
        server.post()
    assert server.once.engine.keeper._live == {}
    assert server.state == "unknown"


# ---------------------------------------------------------------- the client leaves


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_client_that_leaves_mid_stream_stops_nothing(make: Make, taken: int) -> None:
    """The server closes early: the handler runs to its end, the key is completed (tombstone), close is called once."""
    pieces = Pieces(*LARGE)
    server = make(returning(pieces))
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


def test_a_handler_that_breaks_after_its_client_left(make: Make) -> None:
    """Nobody is there to see the error, and the key still says that the outcome is not known."""
    pieces = Pieces(*LARGE, fails_after=9)
    server = make(returning(pieces))
    _, iterable = server.begin()
    with pytest.raises(RuntimeError, match="broke midway"):
        iterable.close()  # type: ignore[attr-defined]
    assert (pieces.closed, server.state) == (1, "unknown")


def test_the_end_of_a_stream_waits_for_the_store(make: Make) -> None:
    """A client that has seen the last piece can rely on the key being completed."""
    server = make(returning(Pieces(*LARGE)))
    _, iterable = server.begin()
    source = iter(iterable)
    for _ in LARGE[1:]:
        next(source)
        assert server.state == "in_progress"
    next(source)
    assert server.state == "completed"
    iterable.close()  # type: ignore[attr-defined]


def test_the_end_of_a_stream_is_withheld_when_it_cannot_be_stored(make: Make) -> None:
    """Without a stored tombstone the client does not see the end, so that it retries; the keeper stores it later."""
    server = make(returning(Pieces(*LARGE)))
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


# ---------------------------------------------------------------- the request's body


def echo(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answers with the body that the app was given, and its length."""
    start_response("200 OK", JSON)
    return [environ["CONTENT_LENGTH"].encode(), b":", environ["wsgi.input"].read()]


def test_a_chunked_body_is_read_to_its_end(make: Make) -> None:
    """With ``wsgi.input_terminated`` a body without a length is read, hashed, and handed on with its length."""
    server = make(echo)
    chunked: dict[str, Any] = {
        "CONTENT_LENGTH": None,
        "wsgi__input_terminated": True,
        "HTTP_TRANSFER_ENCODING": "chunked",
    }
    first = server.post(body=b"", wsgi__input=io.BytesIO(BODY), **chunked)
    assert first.body == b"15:" + BODY
    assert server.post(body=b"", wsgi__input=io.BytesIO(BODY), **chunked).body == first.body
    assert server.post(body=b"", wsgi__input=io.BytesIO(b"{}"), **chunked).status == 422
    assert server.post(body=BODY).headers["idempotency-replayed"] == "true"
    assert server.runs == 1


def test_a_chunked_body_over_the_cap_is_413(make: Make) -> None:
    """No more of it is read than the cap allows, and nothing runs."""
    server = make(echo, max_request_bytes=100)
    stream = io.BytesIO(b"x" * 1000)
    answer = server.post(body=b"", CONTENT_LENGTH=None, wsgi__input_terminated=True, wsgi__input=stream)
    assert (answer.status, server.runs, server.state) == (413, 0, None)
    assert stream.tell() <= 101


def test_a_body_that_says_it_is_over_the_cap_is_not_read(make: Make) -> None:
    """The declared length is enough to refuse: nothing is read into memory."""
    server = make(echo, max_request_bytes=100)
    stream = io.BytesIO(b"x" * 1000)
    answer = server.post(wsgi__input=stream, CONTENT_LENGTH="1000")
    assert (answer.status, server.runs, stream.tell()) == (413, 0, 0)


class Endless(io.RawIOBase):
    """A socket that never ends: to read without a length would hang."""

    def read(self, size: int = -1) -> bytes:
        raise AssertionError("read without a length")


@pytest.mark.parametrize("length", [None, ""], ids=["missing", "empty"])
def test_without_a_length_there_is_no_body(make: Make, length: str | None) -> None:
    """PEP 3333: no CONTENT_LENGTH and no terminated input is an empty body, and the socket is not read."""
    server = make(echo)
    answer = server.post(CONTENT_LENGTH=length, wsgi__input=Endless())
    assert (answer.status, answer.body) == (200, b"0:")
    assert server.post(CONTENT_LENGTH=length, wsgi__input=Endless()).body == b"0:"
    assert server.runs == 1


def test_a_body_that_breaks_off_is_not_executed(make: Make) -> None:
    """A client that left while it was sending has asked for nothing: half a body must not run, nor take the key."""
    server = make(echo)
    answer, _ = server.begin(body=BODY[:7], CONTENT_LENGTH=str(len(BODY)))
    assert server.runs == 0
    assert 400 <= answer.status < 600
    assert server.state is None
    assert server.post().status == 200


def test_a_body_that_cannot_be_read_takes_no_key(make: Make) -> None:
    """The server's error while reading passes through, before anything was reserved."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("the client has gone")

    server = make(echo)
    with pytest.raises(ConnectionResetError):
        server.post(wsgi__input=Broken())
    assert (server.runs, server.state) == (0, None)


def test_no_more_is_read_than_the_length_says(make: Make) -> None:
    """What follows the body on a kept-alive connection is the next request's."""
    server = make(echo)
    stream = io.BytesIO(BODY + b"POST /next HTTP/1.1")
    assert server.post(wsgi__input=stream, CONTENT_LENGTH=str(len(BODY))).body == b"15:" + BODY
    assert stream.tell() == len(BODY)


# ---------------------------------------------------------------- file wrappers


def test_a_file_wrapper_is_no_way_around_the_store(make: Make) -> None:
    """The app does not see the server's file wrapper, so what it sends passes by us and is stored."""

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        start_response("200 OK", JSON)
        return environ.get("wsgi.file_wrapper", FileWrapper)(io.BytesIO(b"the file"), 3)

    class ByKernel:
        """What a server would hand to sendfile without iterating it."""

        def __init__(self, *_: Any) -> None:
            raise AssertionError("the server's own wrapper was used")

    server = make(app)
    first = server.post(wsgi__file_wrapper=ByKernel)
    second = server.post(wsgi__file_wrapper=ByKernel)
    assert first.body == second.body == b"the file"
    assert server.runs == 1


def test_the_app_is_not_asked_to_compress(make: Make) -> None:
    """Identity bytes are stored, since the next client may not take what this one does."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", JSON)
        return [environ.get("HTTP_ACCEPT_ENCODING", "identity").encode()]

    assert make(app).post(HTTP_ACCEPT_ENCODING="gzip").body == b"identity"


# ---------------------------------------------------------------- paths and headers


def test_the_path_is_the_whole_path_in_utf_8(make: Make) -> None:
    """A mounted app's keys are told apart by the path that the client used, not by the part behind the mount."""
    server = make(paid)
    mounted = {"SCRIPT_NAME": "/eu", "PATH_INFO": "/payments/ü".encode().decode("latin-1")}
    server.post(**mounted)
    record = server.record()
    assert record is not None
    assert record.operation == "POST /eu/payments/ü"
    assert server.post(**mounted | {"SCRIPT_NAME": "/us"}).status == 422


def test_the_scope_function_sees_method_path_headers_and_environ(make: Make) -> None:
    """Whose key it is may depend on all of the request but its body."""
    seen = []

    def tenant(request: Any) -> str:
        seen.append(request)
        return "ann"

    server = make(paid, scope=tenant)
    server.post(HTTP_X_API_KEY="secret")
    request = seen[0]
    assert (request.method, request.path) == ("POST", "/payments")
    assert request.headers["x-api-key"] == "secret"
    assert request.headers["content-type"] == "application/json"
    assert request.raw["SERVER_NAME"] == "api.test"
    assert server.store.read([("ann", "k-1")])[0] is not None


@pytest.mark.parametrize("tenant", ["", None, 7])
def test_a_tenant_that_cannot_be_one_never_runs(make: Make, tenant: Any) -> None:
    """Else all callers whom the function could not name would share their keys, and their answers."""
    server = make(paid, scope=lambda request: tenant)
    with pytest.raises(ConfigurationError, match="printable characters that name the tenant"):
        server.post()
    assert server.runs == 0
    assert server.store._rows == {}


def test_an_async_scope_function_is_refused_with_a_clear_error(make: Make) -> None:
    """A WSGI app has no loop to await in: the developer is told what to change, and nothing is looked up or run."""

    async def tenant(request: Any) -> str:
        return "ann"

    server = make(paid, scope=tenant)
    with pytest.raises(ConfigurationError, match=r"async.*WSGI.*plain function"):
        server.post()
    assert server.runs == 0
    assert server.store._rows == {}


# ---------------------------------------------------------------- threads and context


def test_two_threads_with_one_key(make: Make) -> None:
    """While one thread is in the handler, the other is told to come again; each sees only its own operation."""
    entered, go = threading.Event(), threading.Event()
    seen: list[str] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if current().key == "k-1":
            entered.set()
            assert go.wait(SECONDS)
        seen.append(current().key)
        return paid(environ, start_response)

    server = make(app)
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


def test_a_generator_and_its_close_see_the_operation_and_the_thread_does_not(make: Make) -> None:
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

    server = make(app)
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


def test_with_the_store_down_the_app_is_not_called(make: Make) -> None:
    """503 with Retry-After; and after many failures in a row the store is not even asked for a while."""
    server = make(paid)
    server.store.down = {"reserve"}
    for _ in range(7):
        answer = server.post()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert server.runs == 0
    assert any(isinstance(event, events.BreakerOpened) for event in server.events)


def test_a_store_that_hangs_is_a_503_in_time(make: Make) -> None:
    """A store that does not answer is given up after ``begin_timeout``, and what it reserved late is given back."""
    server = make(paid, begin_timeout=timedelta(seconds=0.05))
    hangs = threading.Event()
    reserve = server.store.reserve
    server.store.reserve = lambda batch: (hangs.wait(SECONDS), reserve(batch))[1]  # type: ignore[method-assign]
    assert server.post().status == 503
    assert server.runs == 0
    hangs.set()
    until(lambda: server.store._rows == {}, "the late reservation is given back")
    assert server.post().status == 201


def test_what_cannot_be_stored_is_503_and_stored_later_by_the_keeper(make: Make) -> None:
    """The handler ran and its answer is not lost: the keeper goes on trying, by itself, and the retry gets it."""
    server = make(paid)
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


def test_closing_stores_what_is_unfinished(make: Make) -> None:
    """A graceful end is the last chance of an answer that waits for the store, and it is taken."""
    server = make(paid)
    server.store.down = {"swap"}
    assert server.post().status == 503
    server.once.engine.keeper._look_seconds = 600.0  # not by chance
    server.store.down = set()
    server.once.close()
    assert server.state == "completed"
