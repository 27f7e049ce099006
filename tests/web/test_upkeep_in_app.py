"""Upkeep inside an app: it runs by itself on embedded stores, and where it cannot start the log says so."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, post
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.record import Reservation
from oncekey.core.states import Effects, State
from oncekey.errors import ConfigurationError
from oncekey.upkeep import Upkeep, in_app
from oncekey.web import fastapi, flask, starlette
from oncekey.web.litestar import OnceKeyPlugin

KEY = {"Idempotency-Key": "k-1"}
WORDS = "upkeep never started: this app got no lifespan startup"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def once(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnceKey]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'keys.db'}"}.get(request.param)
    made = OnceKey(url or request.getfixturevalue("postgres_url"), scope=SINGLE_TENANT, migrate=True)
    yield made
    made.close()


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[OnceKey]:
    made = OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT)
    yield made
    made.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the moment that a duty may take before its first turn, none is taken."""
    monkeypatch.setattr("oncekey.upkeep.service.random", SimpleNamespace(uniform=lambda low, high: low))


class Served:
    """An app in an event loop of its own, as a server runs it: ``with`` its lifespan, or without."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()
        self.asked: asyncio.Queue[Any] = asyncio.Queue()
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.life: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self.life = self.loop.create_task(self.app(scope, self.asked.get, self.told.put))
        self.loop.run_until_complete(self._say("startup"))
        return self

    def __exit__(self, *_: object) -> None:
        assert self.life is not None
        self.loop.run_until_complete(self._say("shutdown"))
        self.loop.run_until_complete(self.life)
        self.loop.close()

    async def _say(self, what: str) -> None:
        self.asked.put_nowait({"type": f"lifespan.{what}"})
        assert (await asyncio.wait_for(self.told.get(), 20))["type"] == f"lifespan.{what}.complete"

    def send(self, method: str, path: str, key: str = "k-1") -> int:
        async def sending() -> int:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://shop") as client:
                return (await client.request(method, path, headers={"Idempotency-Key": key})).status_code

        return self.loop.run_until_complete(sending())


def sent_without_lifespan(app: Any) -> int:
    served = Served(app)
    try:
        return served.send("POST", "/payments")
    finally:
        served.loop.close()


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _begins() -> None:
    """Apps of other tests may still be there."""
    _others.clear()
    _others.update(threading.enumerate())


def duties() -> list[str]:
    names = {"oncekey-sweep", "oncekey-reap", "oncekey-reconcile"}
    return sorted(thread.name for thread in set(threading.enumerate()) - _others if thread.name in names)


ALL = ["oncekey-reap", "oncekey-reconcile", "oncekey-sweep"]


def embedded(once: OnceKey) -> bool:
    return not once.store.capabilities.server_clock


async def pay(_: Request) -> JSONResponse:
    return JSONResponse({"paid": True}, 201)


def starlette_app(once: OnceKey, **how: Any) -> Starlette:
    app = Starlette(routes=[Route("/payments", pay, methods=["POST"]), Route("/health", pay)])
    starlette.protect(app, once, **how)
    return app


def fastapi_app(once: OnceKey, **how: Any) -> FastAPI:
    app = FastAPI()

    @app.post("/payments", status_code=201)
    async def pay_here() -> dict[str, bool]:
        return {"paid": True}

    fastapi.protect(app, once, **how)
    return app


def litestar_app(once: OnceKey, **how: Any) -> Litestar:
    @post("/payments", sync_to_thread=False)
    def pay_here() -> dict[str, bool]:
        return {"paid": True}

    return Litestar([pay_here], plugins=[OnceKeyPlugin(once, **how)])


def flask_app(once: OnceKey, **how: Any) -> Flask:
    app = Flask("shop")
    app.add_url_rule("/payments", "pay", lambda: ({"paid": True}, 201), methods=["POST"])
    app.add_url_rule("/health", "health", lambda: "well")
    return flask.protect(app, once, **how)


def left_behind(once: OnceKey) -> None:
    """A key whose process died: its lease is over."""
    wanted = Reservation("t", "left", "POST /payments", b"f" * 32, 1, Effects.REPEATABLE, "dead", 0.0, 3600.0)
    once.store.reserve([wanted])
    once.store.disconnect()


def released(once: OnceKey) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        (record,) = once.store.read([("t", "left")])
        if record is not None and record.state is State.FAILED_RETRYABLE:
            return True
        time.sleep(0.01)
    return False


# -- ASGI --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [starlette_app, fastapi_app, litestar_app])
@pytest.mark.usefixtures("at_once")
def test_upkeep_runs_by_itself_during_the_lifespan_on_an_embedded_store(
    once: OnceKey, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And not on a server's database, where other processes are there to run it, unless the app says so."""
    with Served(make(once)) as api:
        assert api.send("POST", "/payments") == 201
        assert duties() == (ALL if embedded(once) else [])
        if embedded(once):
            left_behind(once)
    assert duties() == []
    with Served(make(once, upkeep=True)):
        assert duties() == ALL
        assert not embedded(once) or released(once)
    with Served(make(once, upkeep=False)):
        assert duties() == []
    assert WORDS not in caplog.text


def test_app_with_two_lifespans_at_once_runs_two_upkeeps(lite: OnceKey) -> None:
    app = starlette_app(lite)
    with Served(app), Served(app):
        assert duties() == sorted(ALL * 2)
    assert duties() == []


def test_mounted_app_says_once_that_its_upkeep_never_started(once: OnceKey, caplog: pytest.LogCaptureFixture) -> None:
    """At its first protected request, not before; an app in memory says nothing unless it asked for upkeep."""
    with Served(Starlette(routes=[Mount("/shop", starlette_app(once, upkeep=True))])) as api:
        api.send("GET", "/shop/health")
        assert WORDS not in caplog.text
        for key in ("k-1", "k-2"):
            assert api.send("POST", "/shop/payments", key) == 201
        assert duties() == []
    (line,) = [entry for entry in caplog.records if WORDS in entry.getMessage()]
    assert line.levelname == "WARNING"
    for part in ("outermost app", "--lifespan on", "oncekey upkeep MODULE:ONCE", "upkeep=False"):
        assert part in line.getMessage()


def test_app_under_a_server_without_lifespan_says_so_where_keys_outlive_the_process(
    once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    """By default: on SQLite. In memory the keys end with the process; a server's database has upkeep elsewhere."""
    assert sent_without_lifespan(starlette_app(once)) == 201
    assert caplog.text.count(WORDS) == (embedded(once) and once.store.capabilities.durable)
    caplog.clear()
    assert sent_without_lifespan(starlette_app(once, upkeep=False)) == 201
    assert WORDS not in caplog.text


def test_upkeep_that_is_nothing_is_refused(lite: OnceKey) -> None:
    for make in (flask_app, litestar_app):
        with pytest.raises(ConfigurationError, match="'auto', True, False or an Upkeep"):
            make(lite, upkeep="yes")


# -- WSGI --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_flask_starts_upkeep_at_its_first_protected_request(once: OnceKey) -> None:
    """Once, however many come together; until the OnceKey is closed, and again when it is used again."""
    app = flask_app(once)
    if embedded(once):
        left_behind(once)
    app.test_client().get("/health")
    assert duties() == []

    def send(number: int) -> int:
        return app.test_client().post("/payments", headers={"Idempotency-Key": f"k-{number}"}).status_code

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(send, range(16))) == {201}
    assert duties() == (ALL if embedded(once) else [])
    assert not embedded(once) or released(once)
    once.close()
    assert duties() == []
    send(1)
    assert duties() == (ALL if embedded(once) else [])
    once.close()
    assert duties() == []


def test_flask_runs_no_upkeep_or_the_given_one(lite: OnceKey) -> None:
    flask_app(lite, upkeep=False).test_client().post("/payments", headers=KEY)
    assert duties() == []
    own = Upkeep(lite, sweep_every=3600)
    flask_app(lite, upkeep=own).test_client().post("/payments", headers=KEY)
    assert duties() == ALL
    with pytest.raises(ConfigurationError, match="running already"):
        own.start()
    lite.close()
    assert duties() == []


class TellingLock:
    """``waits`` is set before a second thread waits for it."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if self._lock.locked():
            self.waits.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_two_first_requests_at_once_start_one_upkeep(lite: OnceKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first has started it: starting an Upkeep twice is refused."""
    started, go = threading.Event(), threading.Event()
    lock = TellingLock()

    class Slow(Upkeep):
        def start(self) -> None:
            started.set()
            assert go.wait(20)
            super().start()

    made = in_app.LazyUpkeep.__init__

    def with_lock(self: in_app.LazyUpkeep, *arguments: Any) -> None:
        made(self, *arguments)
        self._lock = lock  # type: ignore[assignment]

    monkeypatch.setattr(in_app.LazyUpkeep, "__init__", with_lock)
    app = flask_app(lite, upkeep=Slow(lite))
    statuses: list[int] = []

    def send(key: str) -> None:
        statuses.append(app.test_client().post("/payments", headers={"Idempotency-Key": key}).status_code)

    first, second = (threading.Thread(target=send, args=(key,)) for key in ("k-1", "k-2"))
    first.start()
    assert started.wait(20)
    second.start()
    assert lock.waits.wait(20)
    go.set()
    for thread in (first, second):
        thread.join(20)
    assert statuses == [201, 201]
    assert duties() == ALL


def test_upkeep_of_a_flask_app_that_is_gone_ends(lite: OnceKey) -> None:
    """Test suites make an app for each test, and rarely close it."""
    app = flask_app(lite)
    app.test_client().post("/payments", headers=KEY)
    threads = [thread for thread in set(threading.enumerate()) - _others if thread.name in ALL]
    assert len(threads) == 3
    del app
    gc.collect()
    for thread in threads:
        thread.join(20)
    assert duties() == []


def test_upkeep_draws_no_random_number_of_the_apps_own(lite: OnceKey) -> None:
    """A seed that the app, or a property test, has set gives the same numbers whatever upkeep does meanwhile."""
    random.seed(7)
    before = random.getstate()
    lite.store.check()
    left_behind(lite)
    with Upkeep(lite, sweep_every=0.01, reap_every=0.01, reconcile_every=0.01):
        assert released(lite)
    assert random.getstate() == before


SCRIPT = """
import os, sys, threading, warnings
from flask import Flask
from oncekey import SINGLE_TENANT, OnceKey
from oncekey.web.flask import protect

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads; servers do just that
app = Flask("shop")
app.add_url_rule("/payments", "pay", lambda: ({"paid": True}, 201), methods=["POST"])
protect(app, OnceKey(sys.argv[1], scope=SINGLE_TENANT))

def send(key):
    status = app.test_client().post("/payments", headers={"Idempotency-Key": key}).status_code
    return status, sum(thread.name == "oncekey-sweep" for thread in threading.enumerate())

print("parent", *send("a"), flush=True)
child = os.fork()
if not child:
    print("child", sum(thread.name == "oncekey-sweep" for thread in threading.enumerate()), *send("b"), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent", *send("c"), flush=True)
"""


def test_forked_worker_starts_an_upkeep_of_its_own_and_ends_quietly(tmp_path: Path) -> None:
    """As under gunicorn with ``--preload``. A process waits for no thread at its end, and prints no error."""
    command = [sys.executable, "-c", SCRIPT, f"sqlite:///{tmp_path / 'keys.db'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["parent 201 1", "child 0 201 1", "parent 201 1"]
