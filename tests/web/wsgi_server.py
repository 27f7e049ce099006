"""A WSGI app behind our middleware, the server in front of it, and apps that answer as a test wants.

``Server`` is both: it makes the environ of a request, and takes down what it was told.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Record
from oncekey.telemetry import events
from oncekey.testing.http.flaky import ONE, FlakyStore
from oncekey.testing.http.payments import MAX_RESPONSE
from oncekey.web.wsgi import IdempotencyMiddleware

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

    def __init__(
        self,
        app: App,
        *,
        store: FlakyStore | None = None,
        scope: Any = SINGLE_TENANT,
        routes: Any = None,
        **policy: Any,
    ) -> None:
        self.runs = 0
        self.store = store or FlakyStore()
        self.events: list[events.Event] = []
        policy.setdefault("max_response_bytes", MAX_RESPONSE)
        self.once = OnceKey(
            self.store, scope=scope, routes=routes, policy=Policy(**policy), on_event=self.events.append
        )

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


MakeServer = Callable[..., Server]


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
