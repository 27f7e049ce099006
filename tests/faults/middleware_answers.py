"""Middleware that answers in the handler's place: with every framework, in every shape, whatever it answers.

Each case is one key, sent three times. The first meets the middleware; the client retries twice. The provider counts
what was charged, the table what was committed. A key is never charged twice, unless its route says that this is
harmless, and a success is never stored without what it speaks of.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from io import BytesIO
from typing import Any, get_args

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from tests.faults.asgi_request import AsgiRequest, quiet
from tests.faults.campaign import Fault, Run
from tests.faults.middleware_answers_apps import MAKERS
from tests.faults.middleware_answers_handlers import (
    BLOCKING,
    EFFECTS,
    FRAMEWORKS,
    NOT_WRAPPED,
    PATIENCE,
    Case,
    Framework,
    Layer,
    Point,
    Shape,
    Stage,
)

STATUSES = (200, 303, 400, 408, 429, 500, 504)
SENDS = 3
BODY = b"{}"


def cases() -> Iterator[Case]:
    for framework in FRAMEWORKS:
        for layer in _layers(framework):
            for shape in _shapes(framework, layer):
                for status in _statuses(framework, shape):
                    for effects in EFFECTS:
                        if effects == "external, retry" and framework in NOT_WRAPPED:
                            continue  # there it is declared of whatever answers
                        for point in get_args(Point):
                            yield Case(framework, layer, shape, status, effects, point)


def _layers(framework: Framework) -> tuple[Layer, ...]:
    return get_args(Layer) if framework in ("fastapi", "starlette") else ("plain", "copied scope")


def _shapes(framework: Framework, layer: Layer) -> list[Shape]:
    """Neither a thread nor the app behind a BaseHTTPMiddleware can be cancelled: they go on."""
    goes_on = framework in BLOCKING or layer == "BaseHTTPMiddleware"
    return [each for each in get_args(Shape) if not (goes_on and each == "timeout, cancelled")]


def _statuses(framework: Framework, shape: Shape) -> tuple[int, ...]:
    if shape == "retry once":
        return (201, 500)  # the second call returns, or fails too
    # Of an app that is not wrapped, 429 says what it says of any app: it was not processed.
    return tuple(each for each in STATUSES if each != 429 or framework not in NOT_WRAPPED)


EVERYTHING = sum(1 for _ in cases())


class Trials:
    """The cases of one run, one after the other, on one store."""

    def __init__(self, run: Run) -> None:
        self.run = run
        url = run.url()
        self.stage = Stage(url)
        self.once = OnceKey(url, scope=SINGLE_TENANT, routes=dict(_routes()), migrate=True)
        self.once.start()
        connection = self.stage._connect()
        connection.execute("CREATE TABLE payments (key text NOT NULL, cents integer NOT NULL)")
        connection.commit()
        connection.close()
        self.apps: dict[tuple[Framework, Layer], Any] = {}
        self.ended: Counter[str] = Counter()

    async def one(self, case: Case) -> None:
        key = f"key-{self.run.hits}"
        app = self.apps.get((case.framework, case.layer))
        if app is None:
            paths = [route.removeprefix("POST ") for route, _ in _routes()]
            app = MAKERS[case.framework](self.stage, self.once, case.layer, paths)
            self.apps[case.framework, case.layer] = app
        self.stage.begin(case)
        answers, charged = [], []
        for _ in range(SENDS):
            answers.append(await asyncio.wait_for(self._send(app, case, key), PATIENCE))
            await self._until_handlers_ended()
            self.stage.stands = type(self.stage.stands)()  # later handlers do not stand still
            charged.append(self.stage.charged[key])
        self.run.asked(SENDS)
        for promise, what in self._blemishes(case, key, answers, charged):
            self.run.violated(promise, f"{what}: {case}, answers {answers}")
        self.run.hit()

    async def _send(self, app: Any, case: Case, key: str) -> tuple[int, bytes]:
        if case.framework in BLOCKING:
            return await asyncio.to_thread(_speak_wsgi, app, case.path, key)
        asked = AsgiRequest(case.path, key, BODY)
        await asyncio.wait({asked.start(app)})
        return (asked.status, asked.body) if asked.ended else (500, b"")  # as a server answers what was raised

    async def _until_handlers_ended(self) -> None:
        self.stage.goes_on.set()
        until = time.monotonic() + PATIENCE
        while self.stage.inside or self.once.engine.tasks:
            if time.monotonic() > until:
                raise AssertionError(f"a handler does not end: {self.stage.case}")
            await asyncio.sleep(0.0005)
        await self.stage.aclose_opened()

    def _blemishes(
        self, case: Case, key: str, answers: list[tuple[int, bytes]], charged: list[int]
    ) -> Iterator[tuple[str, str]]:
        record = self.once.store.read([("single-tenant", key)])[0]
        state = None if record is None else record.state
        self.ended[str(state)] += 1
        rows = self.stage.rows(key) if case.effects == "transactional" else 0
        happened = charged[-1] + rows
        if case.shape == "retry once" and case.effects.startswith("external"):
            happened -= charged[0] - 1  # the middleware called it twice by itself; no client's retry may add to that
        if happened > 1:
            yield "I1", f"{charged[-1]} charges, {rows} rows, key {state}"
        if state in (State.IN_PROGRESS, State.PENDING):
            yield "I4", f"the key is still {state}"
        stored = None if record is None else record.response
        success = stored is not None and stored.status < 400
        if success and not happened and case.framework not in NOT_WRAPPED:
            yield "I1", f"a success is stored without what it speaks of, key {state}"
        shown = [answer for answer in answers if answer[0] < 400]
        if shown and not success:
            yield "I2", f"a client was told {shown[0]}, and the key is {state}"
        if len(set(shown)) > 1:
            yield "I2", "two successes under one key"
        if answers[0][0] < 400 and set(answers) != {answers[0]}:
            yield "I2", "answered, and then something else"


def _routes() -> list[tuple[str, Policy]]:
    routes = []
    for effects in EFFECTS:
        kind, _, retry = effects.partition(", ")
        policy = Policy(
            effects=kind,  # type: ignore[arg-type]
            on_server_error="retry" if retry else "auto",
            begin_timeout=timedelta(seconds=5),
        )
        routes.append((f"POST /{effects.replace(', ', '-')}", policy))
    return routes


def _speak_wsgi(app: Any, path: str, key: str) -> tuple[int, bytes]:
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(BODY)),
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_IDEMPOTENCY_KEY": key,
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(BODY),
        "wsgi.errors": BytesIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    started: list[str] = []

    def start(status: str, headers: Any, exc_info: Any = None) -> Any:
        started[:] = [status]
        return lambda _: None

    try:
        parts = app(environ, start)
        try:
            body = b"".join(parts)
        finally:
            if hasattr(parts, "close"):
                parts.close()
    except Exception:  # as a server answers what was raised
        return 500, b""
    return int(started[0][:3]), body


def middleware_answers(run: Run) -> None:
    """All cases, or a sample of them."""
    planned = list(cases())
    if run.count < len(planned):
        planned = run.random.sample(planned, run.count)

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        trials = Trials(run)
        try:
            for case in planned:
                await trials.one(case)
        finally:
            await trials.once.aclose(grace=1.0)
        run.notes.append(", ".join(f"{count} {state}" for state, count in trials.ended.most_common()))

    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of responses that the middleware threw away
            asyncio.run(play())
    finally:
        threading.excepthook = hook


FAULTS = (
    Fault(
        "middleware answers in the handler's place",
        middleware_answers,
        counts={"sqlite": EVERYTHING, "postgres": EVERYTHING},
        short=60,
        promises=("I1", "I2", "I4"),
        seconds=120.0,
    ),
)
