"""Jobs that a request leaves in the outbox: with its transaction, with a phase, or not at all; deferred requests."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from starlette.responses import JSONResponse, Response

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.jobs import JobState
from oncekey.core.states import State
from oncekey.engine.operation import Operation
from oncekey.engine.transactions.jobs import MAX_PAYLOAD_BYTES, MAX_TASK_LENGTH
from oncekey.errors import ApplicationError, EnlistError
from oncekey.outbox import Context, Worker
from oncekey.outbox import Response as Settled
from oncekey.stores.api import Outbox
from oncekey.stores.registry import open_store
from oncekey.web import fastapi as web
from tests.engine.phased_api import PhasedApi, now
from tests.enlist.shop import TRANSACTIONAL

Add = Callable[[Operation], Awaitable[Any]]


def adding(add: Add) -> Any:
    """A handler that enlists, writes its row, and adds a job."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.enlist(connection)
        await phased.pay(connection)
        await add(op)

    return serve


async def test_a_job_is_committed_with_the_row(phased: PhasedApi) -> None:
    answer = await phased.post(adding(lambda op: op.enqueue("receipt", {"to": "ada"})), policy=TRANSACTIONAL)
    assert answer.status_code == 201
    rows = phased.jobs("scope, key, key_owner, operation, task, payload, settles, state")
    owner = phased.record.owner
    assert rows == [("single-tenant", "k-1", owner, "POST /payments", "receipt", '{"to":"ada"}', False, "ready")]
    assert phased.shop.payments() == 1


@pytest.mark.parametrize("status", [500, 429])
async def test_rolled_back_with_the_row(phased: PhasedApi, status: int) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> Response:
        await adding(lambda op: op.enqueue("receipt"))(phased, op, connection)
        return JSONResponse({}, status)

    assert (await phased.post(serve, policy=TRANSACTIONAL)).status_code == status
    assert (phased.jobs(), phased.shop.payments(), phased.state) == ([], 0, State.FAILED_RETRYABLE)


async def test_its_downstream_key_is_the_same_in_every_attempt(phased: PhasedApi) -> None:
    """What was rolled back and is done again is the same job downstream; two of one task are two."""
    keys: list[list[str]] = []

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.enlist(connection)
        await op.enqueue("receipt", 1)
        await op.enqueue("receipt", 2)
        assert op.enlisted is not None
        rows = op.enlisted.link.execute(("SELECT downstream_key FROM idempotency_outbox ORDER BY payload",), {})
        keys.append([key for (key,) in (await rows if inspect.isawaitable(rows) else rows)])
        if op.attempt == 1:
            raise NotExecuted("once more")

    api = phased.api(serve, TRANSACTIONAL)
    assert [(await api.post()).status_code for _ in range(2)] == [503, 201]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2


async def test_job_staged_in_a_phase_is_committed_once(phased: PhasedApi) -> None:
    """Committed with the phase, once. Jobs of phases that a later attempt does not run again keep their keys."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def work(name: str) -> None:
            await phased.pay(connection)
            await op.enqueue("receipt", {"of": name})

        await op.phase("first", work, "first", on=connection)
        if op.attempt == 1:
            raise ConnectionError("stumbled")
        await op.phase("second", work, "second", on=connection)

    api = phased.api(serve)
    assert (await api.post()).status_code == 500
    assert [task for task, _ in phased.jobs()] == ["receipt"]
    assert (await api.post()).status_code == 201
    jobs = phased.jobs("payload, downstream_key")
    assert sorted(payload for payload, _ in jobs) == ['{"of":"first"}', '{"of":"second"}']
    assert len({key for _, key in jobs}) == 2, "two jobs share a downstream key: a bank would do one of them"


async def test_a_phase_that_fails_takes_its_job_along(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def work() -> None:
            await op.enqueue("receipt")
            raise ConnectionError("stumbled")

        await op.phase("row", work, on=connection)

    assert (await phased.post(serve)).status_code == 500
    assert phased.jobs() == []


@pytest.mark.parametrize(
    ("run_at", "in_seconds"),
    [
        (lambda: timedelta(hours=1), 3600),
        (lambda: datetime.now(UTC) + timedelta(hours=2), 7200),
        (lambda: None, 0),
        (lambda: timedelta(hours=-1), 0),
    ],
    ids=["an hour from now", "at two hours from now", "now", "an hour ago"],
)
async def test_run_at_of_a_job_is_stored(phased: PhasedApi, run_at: Callable[[], Any], in_seconds: float) -> None:
    assert (await phased.post(adding(lambda op: op.enqueue("receipt", run_at=run_at())))).status_code == 201
    store = open_store(phased.shop.url)
    assert isinstance(store, Outbox)
    (job,) = store.jobs(JobState.READY, 10)
    assert max(0.0, job.run_at - job.now) == pytest.approx(in_seconds, abs=60)
    assert len(store.claim("a-worker", ["receipt"], 10, 30.0)) == (in_seconds == 0)
    store.close()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda op: op.enqueue("receipt", object()), "not JSON"),
        (lambda op: op.enqueue("receipt", "x" * MAX_PAYLOAD_BYTES), "bytes, more than"),
        (lambda op: op.enqueue("receipt", run_at=datetime(2030, 1, 1)), "without a time zone"),  # noqa: DTZ001
        (lambda op: op.enqueue(""), "a task's name"),
        (lambda op: op.enqueue("x" * (MAX_TASK_LENGTH + 1)), "a task's name"),
        (lambda op: op.enqueue("a\nb"), "a task's name"),
    ],
)
async def test_invalid_job_is_refused(phased: PhasedApi, add: Add, says: str) -> None:
    assert (await phased.post(adding(add))).status_code == 500
    assert isinstance(phased.errors[0], ApplicationError)
    assert says in str(phased.errors[0])
    assert (phased.jobs(), phased.shop.payments(), phased.state) == ([], 0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("verb", ["enqueue", "defer"])
async def test_enqueue_without_a_transaction_is_refused(phased: PhasedApi, verb: str) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await getattr(op, verb)("receipt")

    assert (await phased.post(serve)).status_code == 500
    assert isinstance(phased.errors[0], EnlistError)
    assert f"{verb}('receipt') adds a row" in str(phased.errors[0])
    assert "there is none open" in str(phased.errors[0])
    assert ("inside a phase" in str(phased.errors[0])) == (verb == "enqueue")


async def test_enqueue_in_an_effect_is_refused(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.effect("charge", op.enqueue, "receipt", repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert isinstance(phased.errors[0], EnlistError)


async def test_no_deferring_in_a_phase(phased: PhasedApi) -> None:
    """It commits before the request is over: the job could be done before the key is pending."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.phase("row", op.defer, "charge", on=connection)

    assert (await phased.post(serve)).status_code == 500
    assert "a phase commits before the request is over" in str(phased.errors[0])
    assert (phased.jobs(), phased.state) == ([], State.FAILED_RETRYABLE)


async def test_second_defer_is_refused(phased: PhasedApi) -> None:
    async def twice(op: Operation) -> None:
        await op.defer("charge")
        await op.defer("charge")

    assert (await phased.post(adding(twice))).status_code == 500
    assert "deferred already" in str(phased.errors[0])
    assert phased.jobs() == []


# ---------------------------------------------------------------- deferred


def deferring(status: int, error: Exception | None = None) -> Any:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> Response:
        await op.enlist(connection)
        await phased.pay(connection)
        await op.defer("charge", {"cents": 5})
        if error is not None:
            raise error
        return JSONResponse({"taken": True}, status, {"location": "/status/k-1"})

    return serve


@pytest.mark.parametrize("effects", ["transactional", "phased"])
async def test_202_until_the_job_has_settled_it(phased: PhasedApi, effects: Any) -> None:
    api = phased.api(deferring(202), Policy(effects=effects))
    first = await api.post()
    assert (first.status_code, first.headers["location"]) == (202, "/status/k-1")
    assert (phased.state, phased.shop.payments()) == (State.PENDING, 1)
    again = await api.post()
    assert (again.status_code, again.headers["location"]) == (202, "/status/k-1")
    assert "retry-after" in again.headers
    phased.let_the_lease_end()  # a deferred key is no request's to take over
    assert (await api.post()).status_code == 202
    worker = Worker(phased.shop.url)

    @worker.task()
    async def charge(ctx: Context, payload: Any) -> Settled:
        return Settled(201, {"charged": payload["cents"], "under": ctx.downstream_key})

    await worker.serve(until="drained")
    last = await api.post()
    assert (last.status_code, last.json()["charged"]) == (201, 5)
    assert (phased.state, phased.calls) == (State.COMPLETED, {"pay": 1})


async def test_another_request_learns_that_it_is_one(phased: PhasedApi) -> None:
    api = phased.api(deferring(202), TRANSACTIONAL)
    await api.post()
    assert (await api.post(cents=7)).status_code == 422


@pytest.mark.parametrize(
    ("serve", "status", "state"),
    [
        (deferring(422), 422, "failed"),
        (deferring(500), 500, "failed_retryable"),
        (deferring(429), 429, "failed_retryable"),
        (deferring(202, ConnectionError("stumbled")), 500, "failed_retryable"),
        (deferring(202, NotExecuted("not now")), 503, "failed_retryable"),
    ],
)
async def test_an_error_is_no_promise(phased: PhasedApi, serve: Any, status: int, state: str) -> None:
    """Row and job are rolled back, and the key does not wait for a job that is not there."""
    assert (await phased.post(serve, policy=TRANSACTIONAL)).status_code == status
    assert (phased.jobs(), phased.shop.payments(), phased.state) == ([], 0, state)


@pytest.mark.parametrize(
    ("status", "sent", "state", "rows"),
    [(202, 500, State.FAILED_RETRYABLE, 0), (303, 303, State.PENDING, 1)],
    ids=["exception with a success", "redirect"],
)
async def test_raised_answer_after_defer_is_pending_only_with_its_job(
    phased: PhasedApi, status: int, sent: int, state: State, rows: int
) -> None:
    """A redirect that the endpoint raises is its answer: row and job are committed with it. Any other exception rolls
    back. A key that is pending without a job would wait for ever."""
    app = FastAPI()
    opened = []

    @app.post("/payments")
    async def pay() -> None:
        connection = await now_open()
        await current().enlist(connection)
        await now(connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)"))
        await current().defer("charge")
        raise HTTPException(status, headers={"location": "/status"})

    async def now_open() -> Any:
        connection = phased.connect()
        opened.append(await connection if phased.shop.kind == "postgresql" else connection)
        return opened[-1]

    once = OnceKey(phased.shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
    web.protect(app, once)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        answer = await http.post("/payments", headers={"Idempotency-Key": "k-1"})
    phased._opened.extend(opened)
    await once.aclose()
    assert (answer.status_code, phased.state) == (sent, state)
    assert (len(phased.jobs()), phased.shop.payments()) == (rows, rows)


# ---------------------------------------------------------------- due after the key is over


@pytest.mark.parametrize(
    "late", [timedelta(hours=25), timedelta(hours=23), lambda: datetime.now(UTC) + timedelta(days=9)]
)
async def test_job_due_after_its_key_is_over_is_refused(phased: PhasedApi, late: Any) -> None:
    """The reaper would cancel it before it ran, and the client would get 408. Nothing is committed."""
    run_at = late() if callable(late) else late
    assert (
        await phased.post(adding(lambda op: op.defer("charge", run_at=run_at)), policy=TRANSACTIONAL)
    ).status_code == 500
    (error,) = phased.errors
    assert isinstance(error, ApplicationError)
    assert "longer Policy(ttl=…), at least" in str(error)
    assert (phased.jobs(), phased.shop.payments(), phased.state) == ([], 0, State.FAILED_RETRYABLE)


async def test_ttl_that_the_message_names_is_long_enough(phased: PhasedApi) -> None:
    run_at = timedelta(days=3)
    add = adding(lambda op: op.defer("charge", run_at=run_at))
    await phased.post(add, policy=TRANSACTIONAL)
    assert "at least 3 days, 8:00:00" in str(phased.errors[0])
    longer = Policy(effects="transactional", ttl=timedelta(days=3, hours=8))
    await phased.post(add, key="k-2", policy=longer)
    assert (phased.shop.state("k-2"), len(phased.jobs())) == (State.PENDING, 1)


async def test_job_that_settles_nothing_may_outlive_the_key(phased: PhasedApi) -> None:
    add = adding(lambda op: op.enqueue("reminder", run_at=timedelta(days=30)))
    assert (await phased.post(add, policy=TRANSACTIONAL)).status_code == 201
    assert len(phased.jobs()) == 1
