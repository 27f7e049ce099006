"""What a task's end means, without a store: retries, dead letters, and the response for a key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from oncekey.core.jobs import Job, JobEnd, JobState
from oncekey.core.record import StoredResponse
from oncekey.core.responses import MAX_RESPONSE_BYTES
from oncekey.core.states import State
from oncekey.errors import ConfigurationError, Dead, NotExecuted, OutcomeUnknown
from oncekey.outbox.tasks import Response, Task, make_task, raised, returned


def job(attempt: int = 1, *, settles: bool = False) -> Job:
    return Job(
        *("job-1", "acme", "key-1", "owner", "POST /", "task", b"{}", "down-1", settles, JobState.RUNNING, attempt),
        *("worker", 100.0, 1.0, None, None, b"[]", 1.0, None, 2.0),
    )  # fmt: skip


def task(**changes: Any) -> Task:
    limits = {"max_attempts": 3, "timeout": 30.0, "backoff": 2.0, "max_backoff": 10.0}
    return make_task("task", lambda ctx, payload: None, **(limits | changes))


def test_backoff_grows_with_full_jitter_up_to_its_bound() -> None:
    assert [task().retry_in(attempt, 1.0) for attempt in (1, 2, 3, 4, 5)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert task().retry_in(3, 0.25) == 2.0
    assert task().retry_in(3, 0.0) == 0.0
    assert math.isfinite(task(max_backoff=1e300).retry_in(5_000, 1.0))


@pytest.mark.parametrize(
    "limits", [{"max_attempts": 0}, {"timeout": 0}, {"timeout": -1}, {"backoff": -1}, {"max_backoff": -0.1}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="task 'task'"):
        task(**limits)


def test_async_functions_and_objects_are_recognised() -> None:
    class Sender:
        async def __call__(self, ctx: object, payload: object) -> None: ...

        async def method(self, ctx: object, payload: object) -> None: ...

        def plain(self, ctx: object, payload: object) -> None: ...

    limits: dict[str, Any] = {"max_attempts": 3, "timeout": 1.0, "backoff": 1.0, "max_backoff": 1.0}
    functions: list[Any] = [Sender(), Sender().method, Sender().plain, print]
    assert [make_task("t", function, **limits).is_async for function in functions] == [True, True, False, False]


def test_job_that_raises_is_retried_until_its_last_attempt() -> None:
    """Retries carry the whole error; the last attempt is a dead letter."""
    again = raised(job(2), "worker", task(), ValueError("no such mailbox"), 0.5)
    assert (again.end, again.retry_in, again.error) == (JobEnd.RETRY, 2.0, "ValueError: no such mailbox")
    last = raised(job(3), "worker", task(), ValueError(), 0.5)
    assert (last.end, last.error, last.settle) == (JobEnd.DEAD, "ValueError", None)
    assert raised(job(1), "worker", task(), NotExecuted("busy"), 0.5).end is JobEnd.RETRY


@pytest.mark.parametrize("error", [Dead("closed"), OutcomeUnknown("no answer"), ConfigurationError("wrong")])
def test_some_errors_are_final_at_once(error: Exception) -> None:
    """And a key that the job should have settled is unknown, never failed: it may have happened."""
    end = raised(job(1, settles=True), "worker", task(), error, 0.5)
    assert (end.end, end.settle, end.response) == (JobEnd.DEAD, State.UNKNOWN, None)


@pytest.mark.parametrize(
    ("result", "state", "body"),
    [
        (Response(201, {"id": 1}), State.COMPLETED, b'{"id":1}'),
        ((200, [1, 2]), State.COMPLETED, b"[1,2]"),
        ((200, None), State.COMPLETED, b"null"),
        (Response(204), State.COMPLETED, b""),
        (Response(399, body="text"), State.COMPLETED, b"text"),
        (Response(402, {"error": "declined"}), State.FAILED, b'{"error":"declined"}'),
        (Response(500, body=b"\x00"), State.FAILED, b"\x00"),
    ],
)
def test_a_settling_task_returns_the_response_of_its_key(result: object, state: State, body: bytes) -> None:
    end = returned(job(settles=True), "worker", result)
    assert (end.end, end.settle) == (JobEnd.DONE, state)
    assert end.response is not None
    assert end.response.body == body


def test_result_of_a_task_that_settles_no_key_is_ignored() -> None:
    for result in (None, 7, Response(201), (1, 2)):
        assert returned(job(), "worker", result) == replace(returned(job(), "worker", None))
        assert returned(job(), "worker", result).settle is None


@pytest.mark.parametrize("result", [None, "done", {"status": 200}, (201,), (201, {}, {}), ("201", {}), (600, {})])
def test_settling_task_without_a_response_raises(result: object) -> None:
    with pytest.raises(ConfigurationError):
        returned(job(settles=True), "worker", result)


def test_a_response_is_kept_as_it_may_be_replayed() -> None:
    """Names in lower case, JSON by its type, and a body that is too large is a tombstone."""
    response = Response(201, {"id": 1}, headers={"Location": "/payments/1"})
    assert response.stored == StoredResponse(
        201, (("location", "/payments/1"), ("content-type", "application/json")), b'{"id":1}'
    )
    assert Response(200, body=b"x" * MAX_RESPONSE_BYTES).stored.body is not None
    assert Response(200, body=b"x" * (MAX_RESPONSE_BYTES + 1)).stored.body is None


@pytest.mark.parametrize(
    "headers",
    [{"Set-Cookie": "a=b"}, {"authorization": "x"}, {"x": "a\r\nb"}, {"x\0": "a"}, {"x": "\u2603"}, {"x": "\ud800"}],
)
def test_headers_that_would_leak_or_break_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="headers"):
        Response(200, headers=headers)


def test_a_response_has_one_body_and_a_final_status() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        Response(200, {}, body=b"{}")
    for status in (0, 100, 199, 600):
        with pytest.raises(ConfigurationError, match="status"):
            Response(status)
