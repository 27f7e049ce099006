"""A 404 of the status endpoint does not tell whether the key exists: same bytes, same statements, same time.

The times themselves are compared by ``make timing`` (benchmarks/timing.py), on 20,000 samples.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import timing
from benchmarks.timing import Compared
from oncekey import NotAuthorized, OnceKey, Policy, Request
from oncekey.testing.servers import PostgresServer
from oncekey.web import pace
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.status import status_app, status_wsgi
from tests.enlist.wire_counter import WireCounter

USED, NEVER = "a" * 32, "b" * 32
CASES = ("tenant", "bound", "operation")
Ask = Callable[[str], httpx.Response]


def user_of(request: Request) -> str:
    return request.headers["x-user"]


def not_payments(request: Request, operation: str) -> None:
    if operation == "POST /payments" and user_of(request) == "bob":
        raise NotAuthorized


async def paid(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"paid " * 50, "more_body": False})


def once_of(case: str, url: str = "memory://", **options: Any) -> OnceKey:
    """Rows that Bob may not see: of another tenant, of another user, of an operation that is not for him."""
    if case == "bound":
        options |= {"policy": Policy(bind=user_of), "bind_secret": "s" * 32}
    if case == "operation":
        options["authorize"] = not_payments
    scope = user_of if case == "tenant" else lambda request: "acme"
    return OnceKey(url, scope=scope, migrate=True, **options)


async def use_key(once: OnceKey) -> None:
    """Ann pays."""
    transport = httpx.ASGITransport(IdempotencyMiddleware(paid, once, upkeep=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        answer = await client.post("/payments", headers={"X-User": "ann", "Idempotency-Key": USED}, content=b"1")
    assert answer.status_code == 201


async def ask(once: OnceKey, key: str, user: str = "bob") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(status_app(once)), base_url="http://api") as client:
        return await client.get(f"/{key}", headers={"X-User": user})


def ask_wsgi(once: OnceKey, key: str, user: str = "bob") -> httpx.Response:
    with httpx.Client(transport=httpx.WSGITransport(status_wsgi(once)), base_url="http://api") as client:
        return client.get(f"/{key}", headers={"X-User": user})


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
@pytest.mark.parametrize("case", CASES)
async def test_404_of_a_key_of_others_has_the_bytes_of_no_key(case: str, profile: Any) -> None:
    with once_of(case, profile=profile) as once:
        await use_key(once)
        assert (await ask(once, USED, "ann")).status_code == 201
        theirs, never, by_wsgi = await ask(once, USED), await ask(once, NEVER), ask_wsgi(once, USED)
    for answer in (theirs, by_wsgi):
        assert answer.status_code == never.status_code == 404
        assert answer.headers == never.headers
        if profile != "governance":  # each of its errors has an id
            assert answer.content == never.content
        else:
            assert without_id(answer) == without_id(never)


def without_id(answer: httpx.Response) -> object:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(each) for name, each in value.items() if "id" not in name.lower()}
        return value

    return strip(answer.json())


# ---------------------------------------------------------------- the same statements


@pytest.fixture(params=["sqlite", "postgres"])
def counted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> Iterator[tuple[str, Any]]:
    """The address of an empty store, and a function that returns what was asked of it since its last call."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url: str = request.getfixturevalue("postgres_url")
        with WireCounter(server.port) as counter:
            yield url.replace(f":{server.port}/", f":{counter.port}/"), counter.count
        return
    seen: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(lambda text: seen.append(text.replace(USED, "KEY").replace(NEVER, "KEY")))
        return connection

    def since() -> list[str]:
        texts = list(seen)
        seen.clear()
        return texts

    monkeypatch.setattr(sqlite3, "connect", traced)
    yield f"sqlite:///{tmp_path / 'keys.db'}", since


@pytest.mark.parametrize("case", CASES)
async def test_404_of_a_key_of_others_takes_the_statements_of_no_key(case: str, counted: tuple[str, Any]) -> None:
    url, since = counted
    with once_of(case, url) as once:
        await use_key(once)
        await ask(once, NEVER)  # a connection, and statements that are prepared once
        await ask(once, USED)
        since()
        taken = []
        for key in (NEVER, USED, USED, NEVER):
            await ask(once, key)
            taken.append(since())
    assert taken[0]
    assert all(each == taken[0] for each in taken), taken


# ---------------------------------------------------------------- the same time


@pytest.mark.parametrize("case", ["bound", "operation"])
async def test_404_that_may_follow_a_found_row_is_sent_by_the_clock(case: str) -> None:
    with once_of(case) as once:
        await use_key(once)
        for key in (USED, NEVER):
            begun = time.perf_counter()
            await ask(once, key)
            between = time.perf_counter()
            ask_wsgi(once, key)
            assert between - begun >= pace.PACE
            assert time.perf_counter() - between >= pace.PACE


async def test_answers_that_are_not_404_do_not_wait(monkeypatch: Any) -> None:
    monkeypatch.setattr(pace, "seconds_left", None)  # to be called is an error
    with once_of("bound") as once:
        await use_key(once)
        assert (await ask(once, USED, "ann")).status_code == ask_wsgi(once, USED, "ann").status_code == 201


async def test_404_does_not_wait_where_no_row_is_refused_after_it_is_found(monkeypatch: Any) -> None:
    """The look-up by tenant and key does the same work for each, so there is nothing to hide."""
    monkeypatch.setattr(pace, "seconds_left", None)
    with once_of("tenant") as once:
        await use_key(once)
        assert (await ask(once, USED)).status_code == ask_wsgi(once, USED).status_code == 404


@pytest.mark.parametrize(("took", "left"), [(0.001, 0.019), (0.0199, 0.0001), (0.0201, 0.0199), (0.05, 0.01)])
def test_pause_ends_at_the_next_multiple_of_the_pace(monkeypatch: Any, took: float, left: float) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0 + took)
    assert pace.seconds_left(100.0) == pytest.approx(left)


class Time:
    """A clock that stands still while a test works, and moves by what is slept."""

    def __init__(self) -> None:
        self.now = 100.0
        self.in_loop: list[float] = []
        self.in_thread: list[float] = []
        self.threads: set[int] = set()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.in_thread.append(seconds)
        self.threads.add(threading.get_ident())
        self.now += seconds

    async def sleep_in_loop(self, seconds: float) -> None:
        self.in_loop.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("took", "ends"), [(0.001, 0.02), (0.0189, 0.02), (0.0201, 0.04), (0.05, 0.06)])
async def test_last_milliseconds_of_a_pause_are_slept_in_a_thread(monkeypatch: Any, took: float, ends: float) -> None:
    """asyncio's timers count whole milliseconds from the moment at which they are set: they hand on a difference."""
    clock = Time()
    monkeypatch.setattr(pace, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.sleep_in_loop)
    begun = clock.now
    clock.now += took
    await pace.pause(begun)
    assert clock.now == pytest.approx(begun + ends)
    assert clock.in_thread == [pytest.approx(min(ends - took, 0.003))]
    assert clock.threads.isdisjoint({threading.get_ident()})
    assert sum(clock.in_loop) == pytest.approx(max(0.0, ends - took - 0.003))


async def test_pause_does_not_end_before_the_pace() -> None:
    for _ in range(10):
        begun = time.perf_counter()
        await pace.pause(begun)
        assert time.perf_counter() - begun >= pace.PACE


# ---------------------------------------------------------------- the measurement itself


def test_t_is_welchs() -> None:
    """By hand: means 2.5 and 4, variances 5/3 and 5/2, so the error is sqrt(5/12 + 1/2)."""
    assert Compared([1, 2, 3, 4], [2, 3, 4, 5, 6]).t == pytest.approx(-1.5 / (5 / 12 + 1 / 2) ** 0.5)


def test_slowest_samples_are_cut_by_one_bound_for_both_kinds() -> None:
    both = Compared([1.0] * 60 + [2.0] * 40, [1.0] * 60 + [2.0] * 38 + [9.0] * 2)
    assert [len(both.fastest(99).exists), len(both.fastest(99).never)] == [100, 98]
    assert max(both.fastest(61).exists + both.fastest(61).never) == 1.0  # type: ignore[operator]


def test_difference_that_is_there_is_seen() -> None:
    dice = random.Random(7)
    exists, never = ([dice.gauss(mean, 100) for _ in range(10_000)] for mean in (210, 200))
    assert timing.passes("planted", Compared(exists, never))
    assert not timing.passes("tenant", Compared(exists, never))


def test_command_prints_a_row_and_its_verdict(capsys: Any) -> None:
    few = ["--samples", "200", "--paced", "20", "--store", "sqlite", "--way", "in process"]
    code = timing.main([*few, "--case", "tenant", "--case", "bound"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| tenant", "| bound"))]
    assert [row.split(" | ")[1:4] for row in rows] == [["sqlite", "in process", "200"], ["sqlite", "in process", "20"]]
    assert code == any("FAILED" in row for row in rows)
