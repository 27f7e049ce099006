"""``@once.function`` of ``oncekey.web.django``: tasks of a Django project, declared while Django still loads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from tests.web.django_apps import configure

configure()

from django.core.checks import run_checks  # noqa: E402 - Django is configured first
from django.db import connections  # noqa: E402
from django.test import override_settings  # noqa: E402

from oncekey import OutcomeUnknown, current  # noqa: E402
from oncekey.core.states import State  # noqa: E402
from oncekey.engine.transactions.adapters.django_entry import Entered, entered, noted  # noqa: E402
from oncekey.errors import ConfigurationError  # noqa: E402
from oncekey.web.django import conf  # noqa: E402
from oncekey.web.django.operations import MigrateOnceKey  # noqa: E402

ALIAS = "tasks"


@pytest.fixture
def lazy(tmp_path: Path) -> Iterator[conf.LazyOnce]:
    """``once`` of a project whose database is a file."""
    connections.settings[ALIAS] = {**connections.settings["default"], "NAME": str(tmp_path / "shop.sqlite3")}
    made = conf.LazyOnce()
    with override_settings(ONCEKEY={"STORE": ALIAS, "SCOPE": "SINGLE_TENANT"}):
        yield made
    made.reset()
    connections[ALIAS].close()
    del connections[ALIAS]
    del connections.settings[ALIAS]


def test_task_keeps_its_key_in_the_database_of_the_test_runner(lazy: conf.LazyOnce, tmp_path: Path) -> None:
    """Modules of tasks are imported before the test runner renames the database."""
    ran: list[str] = []

    @lazy.function("charge", key="order")
    def charge(order: str) -> int:
        ran.append(order)
        return len(ran)

    connections[ALIAS].settings_dict["NAME"] = str(tmp_path / "test.sqlite3")
    assert [charge("a"), charge("a"), charge.with_key("k")("a")] == [1, 1, 2]
    assert lazy.store.file == tmp_path / "test.sqlite3"
    assert not (tmp_path / "shop.sqlite3").exists()


def test_task_works_with_the_next_once_after_a_reset(lazy: conf.LazyOnce) -> None:
    @lazy.function("charge", key="order")
    def charge(order: str) -> int:
        return current().attempt

    assert charge("a") == 1
    lazy.reset()
    assert charge("b") == 1


def test_async_task_stays_a_coroutine_function_and_runs_once(lazy: conf.LazyOnce) -> None:
    ran: list[str] = []

    @lazy.function("charge", key="order")
    async def charge(order: str) -> int:
        ran.append(order)
        return len(ran)

    async def both() -> list[int]:
        return [await charge("a"), await charge("a")]

    assert asyncio.iscoroutinefunction(charge)
    assert asyncio.run(both()) == [1, 1]


def test_task_of_a_queue_is_refused_at_its_definition(lazy: conf.LazyOnce) -> None:
    task: Any = SimpleNamespace(delay=print)
    with pytest.raises(ConfigurationError, match="the queue's decorator above it"):
        lazy.function("charge", key="order")(task)


def test_wrong_option_of_a_task_is_named_by_the_system_check(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = conf.LazyOnce()

    @lazy.function("charge", key="order", effcts="repeatable")
    def charge(order: str) -> None: ...

    monkeypatch.setattr(conf, "once", lazy)
    with override_settings(ONCEKEY={"STORE": "memory://", "SCOPE": "SINGLE_TENANT"}):
        found = [each for each in run_checks(tags=["oncekey"]) if each.id == "oncekey.E011"]
    assert len(found) == 1
    assert "effcts" in found[0].msg


def ask(sql: str) -> Any:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else None


def test_task_that_enlists_without_arguments_commits_rows_and_key_together(lazy: conf.LazyOnce) -> None:
    """It takes the connection of ``STORE``, as in a view."""

    @lazy.function("pay", key="order", effects="transactional")
    def pay(order: str) -> int:
        current().blocking.enlist()
        ask(f"INSERT INTO payments VALUES ('{order}')")
        if current().attempt == 1:
            raise RuntimeError("the task broke")
        return current().attempt

    ask("CREATE TABLE payments (name TEXT)")
    with pytest.raises(RuntimeError):
        pay("a")
    assert ask("SELECT count(*) FROM payments") == [(0,)]
    assert [pay("a"), pay("a")] == [2, 2]
    assert ask("SELECT count(*) FROM payments") == [(1,)]
    assert [each.state for each in lazy.store.listing()] == [State.COMPLETED]


def test_task_enlists_although_its_thread_wrote_before_it(lazy: conf.LazyOnce) -> None:
    """As a view does that writes and then calls the function. The write is committed, and is not the function's."""

    @lazy.function("pay", key="order", effects="transactional")
    def pay(order: str, early: bool = False) -> int:
        if early:
            ask("INSERT INTO payments VALUES ('early')")
        current().blocking.enlist()
        ask("INSERT INTO payments VALUES ('pay')")
        return current().attempt

    ask("CREATE TABLE payments (name TEXT)")
    of_view = Entered(connections[ALIAS].connection)
    with noted({ALIAS: of_view}):
        ask("INSERT INTO payments VALUES ('of the view')")
        assert [pay("a"), pay("a"), pay.with_key("k")("b")] == [1, 1, 1]
        with pytest.raises(OutcomeUnknown, match="has written already"):
            pay("c", early=True)
        assert entered(ALIAS) == of_view, "the view's own count is as it was"


@pytest.mark.parametrize("atomic_requests", [True, False])
def test_async_task_that_wrote_before_it_enlists_is_unknown(lazy: conf.LazyOnce, atomic_requests: bool) -> None:
    """The write is committed, and a retry would write it again. The setting is about views."""
    connections[ALIAS].settings_dict["ATOMIC_REQUESTS"] = atomic_requests

    @lazy.function("pay", key="order", effects="transactional")
    async def pay(order: str) -> None:
        await sync_to_async(ask)("INSERT INTO payments VALUES ('early')")
        await current().enlist()
        raise RuntimeError("the task broke")

    ask("CREATE TABLE payments (name TEXT)")
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            async_to_sync(pay)("a")
    assert ask("SELECT count(*) FROM payments") == [(1,)]


@pytest.mark.parametrize("name", ["file:memorydb_x?mode=memory&cache=shared", ":memory:", ""])
def test_migration_leaves_a_test_database_in_memory_alone(lazy: conf.LazyOnce, tmp_path: Path, name: str) -> None:
    """Django's test runner migrates such a database before any test; oncekey could not open it."""
    connections[ALIAS].settings_dict["NAME"] = name or str(tmp_path / "test.sqlite3")
    MigrateOnceKey().database_forwards("shop", SimpleNamespace(connection=connections[ALIAS]), None, None)
    tables = [table for (table,) in ask("SELECT name FROM sqlite_master WHERE name = 'idempotency_keys'")]
    assert tables == ([] if name else ["idempotency_keys"])
