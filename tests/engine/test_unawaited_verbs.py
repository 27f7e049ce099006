"""A verb that a handler calls and does not await has not happened: no success is stored or sent for it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import flask
import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException
from fastapi.responses import JSONResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.policy import EffectsName
from oncekey.core.states import State
from oncekey.web.fastapi import protect
from oncekey.web.flask import protect as protect_flask

KEY = "k-1"
Verb = Callable[[sqlite3.Connection], Coroutine[Any, Any, Any]]
VERBS: dict[str, Verb] = {
    "enqueue": lambda db: current().enqueue("receipt"),
    "defer": lambda db: current().defer("receipt"),
    "phase": lambda db: current().phase("note", lambda: 1, on=db),
    "effect": lambda db: current().effect("charge", charge, repeatable=True),
}


async def charge() -> int:
    return 1


class Api:
    """One FastAPI route over a SQLite file with one table of payments."""

    def __init__(self, path: Path) -> None:
        self.path = path / "shop.db"
        self.calls = 0
        self.once: OnceKey
        self.app = FastAPI()
        with closing(sqlite3.connect(self.path)) as db:
            db.execute("CREATE TABLE payments (cents integer)")

    def serve(self, effects: EffectsName, pay: Callable[..., Any]) -> None:
        self.once = OnceKey(f"sqlite:///{self.path}", scope=SINGLE_TENANT, policy=Policy(effects=effects), migrate=True)
        protect(self.app, self.once)
        self.app.post("/pay", status_code=201)(pay)

    def route(self, effects: EffectsName, body: Callable[[sqlite3.Connection], Awaitable[Any]]) -> None:
        """Serve a handler that opens a connection, and counts itself."""

        async def pay() -> Any:
            self.calls += 1
            with closing(self.connect()) as db:
                return await body(db)

        self.serve(effects, pay)

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, check_same_thread=False)

    async def send(self) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post("/pay", headers={"Idempotency-Key": KEY})

    def count(self, table: str) -> int:
        with closing(self.connect()) as db:
            return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    @property
    def state(self) -> State:
        (record,) = self.once.store.read([("single-tenant", KEY)])
        assert record is not None
        return record.state


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.once.close()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("effects", "status", "state", "calls"),
    [
        ("transactional", 500, State.FAILED_RETRYABLE, 2),
        ("phased", 500, State.FAILED_RETRYABLE, 2),
        ("external", 409, State.UNKNOWN, 1),
    ],
)
async def test_verb_without_await_is_logged_and_its_success_is_neither_stored_nor_sent(
    api: Api,
    caplog: pytest.LogCaptureFixture,
    verb: str,
    effects: EffectsName,
    status: int,
    state: State,
    calls: int,
) -> None:
    async def body(db: sqlite3.Connection) -> dict[str, int]:
        VERBS[verb](db)  # type: ignore[unused-coroutine]
        return {"paid": 1}

    api.route(effects, body)
    first = await api.send()
    assert (first.status_code, api.state) == (status, state)
    assert "paid" not in first.text
    (message,) = errors(caplog)
    assert message.startswith(f"POST /pay: op.{verb}(…) was not awaited, so it did not happen")
    assert f"`await op.{verb}(…)`" in message
    assert f"op.blocking.{verb}(…)" in message
    assert (await api.send()).status_code == status
    assert (api.calls, api.state) == (calls, state)


async def test_forgotten_enqueue_rolls_back_its_transaction_and_the_corrected_retry_commits_both(api: Api) -> None:
    async def pay() -> dict[str, int]:
        api.calls += 1
        await current().enlist(db)
        db.execute("INSERT INTO payments VALUES (500)")
        adding = current().enqueue("receipt")
        if api.calls > 1:
            await adding
        return {"paid": 1}

    api.serve("transactional", pay)
    for status, rows in ((500, 0), (201, 1), (201, 1)):
        with closing(api.connect()) as db:
            assert (await api.send()).status_code == status
        assert (api.count("payments"), api.count("idempotency_outbox")) == (rows, rows)
    assert api.calls == 2


async def test_forgotten_phase_after_an_awaited_one_runs_in_the_retry_and_the_first_does_not_run_again(
    api: Api,
) -> None:
    async def body(db: sqlite3.Connection) -> dict[str, int]:
        def insert() -> None:
            db.execute("INSERT INTO payments VALUES (500)")

        await current().phase("first", insert, on=db)
        second = current().phase("second", insert, on=db)
        if api.calls > 1:
            await second
        return {"paid": 1}

    api.route("phased", body)
    for status, rows in ((500, 1), (201, 2), (201, 2)):
        assert (await api.send()).status_code == status
        assert api.count("payments") == rows


async def in_a_task_group(verbs: list[Coroutine[Any, Any, Any]]) -> None:
    async with asyncio.TaskGroup() as group:
        for verb in verbs:
            group.create_task(verb)


RUNNERS: dict[str, Callable[[list[Coroutine[Any, Any, Any]]], Awaitable[Any]]] = {
    "create_task": lambda verbs: asyncio.wait([asyncio.create_task(verb) for verb in verbs]),
    "gather": lambda verbs: asyncio.gather(*verbs),
    "wait_for": lambda verbs: asyncio.gather(*(asyncio.wait_for(verb, 30) for verb in verbs)),
    "TaskGroup": in_a_task_group,
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("verb", ["phase", "effect"])
async def test_step_awaited_through_asyncio_is_stored(
    api: Api, caplog: pytest.LogCaptureFixture, runner: str, verb: str
) -> None:
    async def body(db: sqlite3.Connection) -> dict[str, int]:
        await RUNNERS[runner]([VERBS[verb](db)])
        return {"paid": 1}

    api.route("phased", body)
    assert [(await api.send()).status_code for _ in range(2)] == [201, 201]
    assert (api.calls, api.state, errors(caplog)) == (1, State.COMPLETED, [])


@pytest.mark.parametrize("runner", RUNNERS)
async def test_jobs_enqueued_through_asyncio_are_committed(
    api: Api, caplog: pytest.LogCaptureFixture, runner: str
) -> None:
    async def pay() -> dict[str, int]:
        await current().enlist(db)
        await RUNNERS[runner]([current().enqueue("receipt", number) for number in range(3)])
        return {"paid": 1}

    api.serve("transactional", pay)
    with closing(api.connect()) as db:
        assert (await api.send()).status_code == 201
    assert (api.count("idempotency_outbox"), api.state, errors(caplog)) == (3, State.COMPLETED, [])


async def test_verb_that_started_and_still_runs_when_the_handler_returns_does_not_count(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    started, goes_on = asyncio.Event(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def slow() -> None:
        started.set()
        await goes_on.wait()

    async def body(db: sqlite3.Connection) -> dict[str, int]:
        tasks.append(asyncio.create_task(current().effect("slow", slow, repeatable=True)))
        await started.wait()
        return {"paid": 1}

    api.route("phased", body)
    assert (await api.send()).status_code == 201
    goes_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (api.state, errors(caplog)) == (State.COMPLETED, [])


async def test_task_that_did_not_start_before_the_response_cannot_start_after_it(api: Api) -> None:
    """Its success is not stored, so a retry runs: the old task must not call the effect beside it."""
    tasks: list[asyncio.Task[None]] = []
    called = []

    async def late() -> None:
        called.append(api.calls)

    async def body(db: sqlite3.Connection) -> dict[str, int]:
        tasks.append(asyncio.create_task(current().effect("late", late, repeatable=True)))
        return {"paid": 1}

    api.route("phased", body)
    assert (await api.send()).status_code == 500
    (error,) = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(error, RuntimeError)
    assert (called, api.state) == ([], State.FAILED_RETRYABLE)


async def test_verb_of_a_background_task_does_not_count(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    ran = asyncio.Event()

    async def pay(background: BackgroundTasks) -> dict[str, int]:
        operation = current()

        async def later() -> None:
            with suppress(Exception):  # the request is over, and so is its key
                await operation.effect("charge", charge, repeatable=True)
            ran.set()

        background.add_task(later)
        return {"paid": 1}

    api.serve("phased", pay)
    assert (await api.send()).status_code == 201
    async with asyncio.timeout(10):
        await ran.wait()
    assert (api.state, errors(caplog)) == (State.COMPLETED, [])


async def test_verb_that_the_handler_cancelled_or_closed_does_not_count(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(db: sqlite3.Connection) -> dict[str, int]:
        task = asyncio.create_task(VERBS["effect"](db))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        VERBS["phase"](db).close()
        return {"paid": 1}

    api.route("phased", body)
    assert (await api.send()).status_code == 201
    assert errors(caplog) == []


@pytest.mark.parametrize("effects", ["transactional", "phased", "external"])
async def test_exception_that_becomes_a_4xx_before_the_await_is_stored(
    api: Api, caplog: pytest.LogCaptureFixture, effects: EffectsName
) -> None:
    left: list[Coroutine[Any, Any, Any]] = []

    async def body(db: sqlite3.Connection) -> None:
        left.append(VERBS["effect"](db))
        raise HTTPException(402, "no funds")

    api.route(effects, body)
    assert [(await api.send()).status_code for _ in range(2)] == [402, 402]
    assert (api.calls, api.state, errors(caplog)) == (1, State.FAILED, [])
    left[0].close()


@pytest.mark.parametrize("answer", [HTTPException(303, headers={"Location": "/"}), JSONResponse({"error": 1}, 402)])
async def test_raised_redirect_or_returned_4xx_would_commit_and_is_not_stored(
    api: Api, caplog: pytest.LogCaptureFixture, answer: HTTPException | JSONResponse
) -> None:
    async def body(db: sqlite3.Connection) -> JSONResponse:
        VERBS["enqueue"](db)  # type: ignore[unused-coroutine]
        if isinstance(answer, HTTPException):
            raise answer
        return answer

    api.route("transactional", body)
    assert (await api.send()).status_code == 500
    assert (api.state, len(errors(caplog))) == (State.FAILED_RETRYABLE, 1)


async def test_async_verb_in_a_plain_fastapi_handler_is_logged_and_not_stored(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    def pay() -> dict[str, int]:
        current().enqueue("receipt")  # type: ignore[unused-coroutine]
        return {"paid": 1}

    api.serve("transactional", pay)
    assert (await api.send()).status_code == 500
    assert api.state is State.FAILED_RETRYABLE
    assert [message.split(",")[0] for message in errors(caplog)] == ["POST /pay: op.enqueue(…) was not awaited"]


def test_async_verb_in_a_flask_view_is_logged_and_not_stored(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    app = flask.Flask(__name__)
    api.once = OnceKey(
        f"sqlite:///{api.path}", scope=SINGLE_TENANT, policy=Policy(effects="transactional"), migrate=True
    )
    protect_flask(app, api.once)

    @app.post("/pay")
    def pay() -> tuple[str, int]:
        current().enqueue("receipt")  # type: ignore[unused-coroutine]
        return "paid", 201

    assert app.test_client().post("/pay", headers={"Idempotency-Key": KEY}).status_code == 500
    assert api.state is State.FAILED_RETRYABLE
    assert [message.split(",")[0] for message in errors(caplog)] == ["POST /pay: op.enqueue(…) was not awaited"]


async def test_verbs_are_coroutines_noted_until_they_start_and_named_after_the_verb(api: Api) -> None:
    seen: list[Any] = []

    async def body(db: sqlite3.Connection) -> dict[str, int]:
        operation = current()
        seen.append(operation.unawaited)
        verb = VERBS["effect"](db)
        seen.append((inspect.iscoroutine(verb), getattr(verb, "__qualname__", None), len(operation.unawaited or ())))
        await verb
        seen.append(operation.unawaited)
        return {"paid": 1}

    api.route("phased", body)
    assert (await api.send()).status_code == 201
    assert seen == [None, (True, "Operation.effect", 1), {}]
