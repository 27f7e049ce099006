"""Tasks of a real Celery worker: the order of decorators, bound tasks, and retries by the queue with the same key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, current_task
from celery.contrib.testing.worker import start_worker

from oncekey import SINGLE_TENANT, InProgress, OnceKey, OutcomeUnknown, current
from oncekey.core.routes import Route
from oncekey.errors import ConfigurationError
from oncekey.functions.attempt import Attempt

pytestmark = pytest.mark.frameworks


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


@pytest.fixture
def app() -> Celery:
    return Celery("shop", broker="memory://", backend="cache+memory://")


def test_tasks_of_a_worker_run_once(once: OnceKey, app: Celery) -> None:
    charged: list[Any] = []

    @app.task
    @once.function("charge", key="order")
    def charge(order: str, cents: int) -> dict[str, Any]:
        charged.append(order)
        return {"number": len(charged)}

    @app.task(bind=True)
    @once.function("bound", key=lambda: current_task.request.id, ignore=["self"])
    def bound(self: Any, order: str) -> list[Any]:
        charged.append(order)
        return [current().key == self.request.id, self.name.rpartition(".")[2]]

    @app.task(bind=True, max_retries=3, default_retry_delay=0)
    @once.function("stumbling", key="order", effects="repeatable", ignore=["self"])
    def stumbling(self: Any, order: str) -> int:
        charged.append(order)
        if current().attempt < 3:
            raise self.retry()
        return current().attempt

    @app.task(autoretry_for=(InProgress,), retry_kwargs={"countdown": 0.05}, max_retries=None)
    @once.function("slow", key="order")
    def slow(order: str) -> str:
        charged.append(order)
        return "done"

    @app.task(autoretry_for=(TimeoutError,), default_retry_delay=0, max_retries=3)
    @once.function("external", key="order")
    def external(order: str) -> None:
        charged.append(order)
        raise TimeoutError

    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="WARNING"):  # else ERROR, for all tests
        first, second = charge.delay("a", 5), charge.delay("a", 5)
        assert first.get(timeout=20) == second.get(timeout=20) == {"number": 1}
        assert bound.delay("b").get(timeout=20) == [True, "bound"]
        assert stumbling.delay("c").get(timeout=20) == 3

        # Another process has the key: the task is retried by Celery until that one has ended.
        attempt = _attempt_of(once)
        with attempt:
            waiting = slow.delay("d")
            threading.Event().wait(0.3)
            assert not waiting.ready()
            attempt.keep(b'"by the other"')
        assert waiting.get(timeout=20) == "by the other"
        # The key is unknown after the first TimeoutError, so Celery's retry does not run it again.
        with pytest.raises(OutcomeUnknown):
            external.delay("e").get(timeout=20)
    assert charged == ["a", "b", "c", "c", "c", "e"]


def _attempt_of(once: OnceKey) -> Attempt:
    return Attempt(once, Route("slow", once.policy_of("slow")), tenant="single-tenant", key="d", body=b"{}")


def test_celery_decorator_below_is_refused(once: OnceKey, app: Celery) -> None:
    with pytest.raises(ConfigurationError, match="the queue's decorator above it"):

        @once.function("charge", key="order")
        @app.task
        def charge(order: str) -> None: ...
