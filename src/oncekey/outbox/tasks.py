"""What a task is, what it is given, and what its end means for its job and for the key that it settles.

All of it is pure, except :meth:`Context.record`, which asks the worker to store something.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any

from oncekey.core.jobs import Conclusion, Job, JobEnd
from oncekey.core.responses import Response, as_response
from oncekey.core.states import State
from oncekey.core.values import value
from oncekey.errors import ConfigurationError, Dead, JobLost, OutcomeUnknown

__all__ = ["Context", "Response", "Task", "buried", "make_task", "raised", "returned"]

STORE_WAIT_SECONDS = 30.0
"""How long ``record`` waits in a thread. The store's own limit is shorter; this one is for a worker that has ended."""


@value
class Task:
    """A function of the app, the name that jobs call it by, and its limits."""

    name: str
    function: Callable[[Context, Any], Any]
    is_async: bool
    max_attempts: int
    timeout: float
    backoff: float
    max_backoff: float

    def retry_in(self, attempt: int, chance: float) -> float:
        """Seconds before the next attempt: exponential with full jitter, so that many jobs do not retry at once.

        ``chance`` is between 0 and 1. The exponent is bounded, because 2.0**1100 raises OverflowError.
        """
        return chance * min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, 64))


def make_task(
    name: str,
    function: Callable[[Context, Any], Any],
    *,
    max_attempts: int,
    timeout: float,
    backoff: float,
    max_backoff: float,
) -> Task:
    if max_attempts < 1:
        raise ConfigurationError(f"task '{name}': max_attempts={max_attempts} must be at least 1")
    if timeout <= 0 or backoff < 0 or max_backoff < 0:
        raise ConfigurationError(f"task '{name}': timeout must be more than 0 seconds, backoffs 0 or more")
    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(target)
    return Task(name, function, is_async, max_attempts, timeout, backoff, max_backoff)


def returned(job: Job, owner: str, result: object) -> Conclusion:
    """The end of a task that returned."""
    if not job.settles:
        return Conclusion(job.id, owner, JobEnd.DONE)
    response = as_response(result)
    if response is None:
        raise ConfigurationError(
            f"a job of this task settles its key, so the task must return Response(status, json) or (status, json), "
            f"not {type(result).__name__}: correct the task and take the dead letter up again"
        )
    state = State.COMPLETED if response.status < 400 else State.FAILED
    return Conclusion(job.id, owner, JobEnd.DONE, settle=state, response=response, of=(job.scope, job.key))


def raised(job: Job, owner: str, task: Task, error: BaseException, chance: float) -> Conclusion:
    """The end of a task that raised: another attempt, or a dead letter. The job keeps the whole error message."""
    message = str(error)
    words = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, Dead | OutcomeUnknown | ConfigurationError) or job.attempt >= task.max_attempts:
        return buried(job, owner, words)
    wait, of = task.retry_in(job.attempt, chance), (job.scope, job.key)
    return Conclusion(job.id, owner, JobEnd.RETRY, retry_in=wait, error=words, of=of)


def buried(job: Job, owner: str, words: str) -> Conclusion:
    """A dead letter. The task may have acted or not, so a key that it should have settled becomes unknown."""
    settle, of = State.UNKNOWN if job.settles else None, (job.scope, job.key)
    return Conclusion(job.id, owner, JobEnd.DEAD, error=words, settle=settle, of=of)


class Context:
    """What a task gets besides its payload."""

    __slots__ = (
        *("_in_thread", "_note", "attempt", "downstream_key", "job_id", "key", "last_attempt", "operation"),
        *("provider_id", "scope", "task"),
    )

    def __init__(self, job: Job, task: Task, note: Callable[[str], Future[bool]]) -> None:
        self.task = task.name
        self.job_id = job.id
        self.scope = job.scope
        self.key = job.key
        self.operation = job.operation
        self.downstream_key = job.downstream_key
        """The key for a call to a provider, the same at every attempt: a provider that honours it acts once."""
        self.attempt = job.attempt
        self.last_attempt = job.attempt >= task.max_attempts
        self.provider_id = job.provider_id
        """The id that an earlier attempt stored with ``record``."""
        self._note = note
        self._in_thread = not task.is_async

    def record(self, provider_id: str) -> Awaitable[None]:
        """Store the provider's id before the job is done. An async task awaits this call; a sync task only calls it.

        A webhook can then find the key by that id, and a later attempt has it as ``ctx.provider_id``. Raises JobLost if
        another worker has this job.
        """
        if not _names_something(provider_id):
            raise ConfigurationError("ctx.record(provider_id): it takes printable text, and at least one character")
        stored = self._note(provider_id)
        if self._in_thread:
            _recorded(stored.result(STORE_WAIT_SECONDS))
            return _Done()
        return _awaited(asyncio.wrap_future(stored))


def _names_something(provider_id: object) -> bool:
    """Whether this is usable as an id. A provider may have sent a number, or nothing."""
    return isinstance(provider_id, str) and provider_id != "" and provider_id.isprintable()


class _Done:
    """An awaitable that is already done."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


def _recorded(kept: bool) -> None:
    if not kept:
        raise JobLost("the lease of this job went to another worker: the provider's id was not stored, stop here")


def _awaited(stored: asyncio.Future[bool]) -> Awaitable[None]:
    async def wait() -> None:
        _recorded(await stored)

    return asyncio.ensure_future(wait())
