"""A store that cannot be used as it is: a wrong URL, a wrong schema, or none yet when the app starts."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.errors import ConfigurationError, SchemaError
from oncekey.stores.memory import MemoryStore
from oncekey.stores.registry import open_store
from oncekey.telemetry import events
from oncekey.web.fastapi import protect
from tests.web.apps import Api, MakeApi, World, soon, until


@pytest.fixture
def framework() -> str:
    """It makes no difference here."""
    return "starlette"


# ---------------------------------------------------------------- its URL


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mongodb://localhost/keys", "no store is known"),
        ("keys.db", "no store is known"),
        ("", "no store is known"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///app.db?timeout=30", "takes one option"),
        ("sqlite:///app.db#keys", "takes one option"),
        ("postgresql://[", "postgresql://user@host/database"),
    ],
)
def test_unknown_store_url_names_the_known_ones(url: str, words: str) -> None:
    """One sentence, when the app is made and not at the first request."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        OnceKey(url, scope=SINGLE_TENANT)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "://" in sentence


def test_the_password_of_a_bad_url_is_not_repeated() -> None:
    """The sentence ends up in logs."""
    with pytest.raises(ConfigurationError) as caught:
        OnceKey("postgresql://me:hunter2@host:notaport:1/db?what=", scope=SINGLE_TENANT)
    assert "hunter2" not in str(caught.value)


# ---------------------------------------------------------------- its schema


def _migrate(url: str) -> None:
    store = open_store(url)
    store.migrate()
    store.close()


def _without_tables(url: str) -> None:
    del url


def _older(url: str) -> None:
    _migrate(url)
    with psycopg.connect(url, autocommit=True) as connection:
        newest = "(SELECT max(abs(number)) FROM oncekey_schema)"  # one that older versions can work with is negative
        connection.execute(f"DELETE FROM oncekey_schema WHERE abs(number) = {newest}")


def _newer(url: str) -> None:
    _migrate(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO oncekey_schema (number, name) VALUES (9999, 'from_the_future')")


SCHEMAS = [(_without_tables, "oncekey migrate"), (_older, "oncekey migrate"), (_newer, "upgrade the oncekey package")]


@pytest.mark.parametrize(("damage", "words"), SCHEMAS, ids=["missing", "older", "newer"])
async def test_wrong_schema_refuses_to_start_and_names_the_command(
    postgres_url: str, damage: Callable[[str], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lifespan fails with one sentence, and a request that comes all the same is refused, not run."""
    damage(postgres_url)
    api = Api(World(postgres_url), "starlette", migrate=False)
    with pytest.raises(SchemaError, match=words) as caught:
        api.once.start()
    assert "\n" not in str(caught.value)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    with caplog.at_level(logging.ERROR, "oncekey"), pytest.raises(SchemaError):
        await soon(api.app({"type": "lifespan", "asgi": {}, "state": {}}, receive, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert words in sent[0]["message"]
    assert words in caplog.text
    assert "postgres@" not in sent[0]["message"]
    answer = await api.post()
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert api.runs == 0
    assert any(words.split(maxsplit=1)[0] in event.error for event in api.saw(events.StoreFailed))
    await api.close()


async def test_a_newer_sqlite_file_refuses_to_start(tmp_path: Path) -> None:
    """SQLite upgrades itself, but never goes back: the file of a newer version is left as it is."""
    path = tmp_path / "keys.db"
    _migrate(f"sqlite:///{path}")
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("INSERT INTO oncekey_schema VALUES (9999, 'from_the_future', 0)")
    connection.close()
    api = Api(World(f"sqlite:///{path}"), "starlette")
    with pytest.raises(SchemaError, match="upgrade the oncekey package"):
        api.once.start()
    assert (await api.post()).status_code == 503
    assert api.runs == 0
    await api.close()


async def test_tables_that_are_made_later_are_found_without_a_restart(postgres_url: str) -> None:
    """``oncekey migrate`` is enough: the running process needs nothing."""
    api = Api(World(postgres_url), "starlette", migrate=False)
    assert (await api.post()).status_code == 503
    _migrate(postgres_url)
    assert (await api.post()).status_code == 201
    await api.close()


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_a_table_that_disappears_is_503_and_never_a_first_request(make_api: MakeApi) -> None:
    """Hazard 12: what is missing is not new."""
    api = make_api()
    assert (await api.post()).status_code == 201
    with psycopg.connect(api.world.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE idempotency_keys RENAME TO hidden")
        try:
            answer = await api.post()
        finally:
            connection.execute("ALTER TABLE hidden RENAME TO idempotency_keys")
    assert answer.status_code == 503
    assert api.runs == 1
    assert (await api.post()).status_code == 201
    assert api.runs == 1


# ---------------------------------------------------------------- its start


async def test_a_store_that_is_down_at_the_start_does_not_keep_the_app_down(tmp_path: Path) -> None:
    """Only a wrong schema refuses to start: a database that restarts together with the app comes back by itself."""
    folder = tmp_path / "not-yet"
    api = Api(World(f"sqlite:///{folder / 'keys.db'}"), "starlette")
    sent: list[str] = []
    incoming: asyncio.Queue[Any] = asyncio.Queue()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    lifespan = asyncio.create_task(api.app({"type": "lifespan", "asgi": {}, "state": {}}, incoming.get, send))
    incoming.put_nowait({"type": "lifespan.startup"})
    await until(lambda: sent, "it has started")
    assert sent == ["lifespan.startup.complete"]
    assert (await api.post()).status_code == 503
    folder.mkdir()
    assert (await api.post()).status_code == 201
    incoming.put_nowait({"type": "lifespan.shutdown"})
    await soon(lifespan)
    assert api.runs == 1
    await api.close()


async def test_a_setting_that_makes_no_sense_at_the_start_refuses_to_start() -> None:
    """An error that no waiting cures is a failed start, in words. Only raised out of the lifespan, uvicorn takes it for
    an app that has none, and serves: without the app's own start-up, and with a 503 for every request."""

    class Impossible(MemoryStore):
        def check(self) -> None:
            raise ConfigurationError("the file cannot use write-ahead logging: put it on a local disk")

    api = Api(World("memory://"), "starlette", store=Impossible())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    with pytest.raises(ConfigurationError):
        await soon(api.app({"type": "lifespan", "asgi": {}, "state": {}}, receive, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "local disk" in sent[0]["message"]
    await api.close()


@pytest.mark.timeout(20)
def test_test_client_of_an_app_that_cannot_start_raises_and_does_not_wait_for_ever() -> None:
    class Empty(MemoryStore):
        def check(self) -> None:
            raise SchemaError("run `oncekey migrate`")

    app = FastAPI()
    protect(app, OnceKey(Empty(), scope=SINGLE_TENANT))
    with pytest.raises(SchemaError, match="run `oncekey migrate`"), TestClient(app):
        pytest.fail("it has started")
