"""A cache in front of PostgreSQL: replays without the database, and never a reason for a second run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import redis
from fastapi import FastAPI, Request
from flask import Flask
from typer.testing import CliRunner

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.cli.app import app as cli
from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import ConfigurationError
from oncekey.stores.cache import front
from oncekey.stores.cache.entries import name_of
from oncekey.stores.redis.cache import InLoopRedisCache
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer, RedisServer
from oncekey.web.fastapi import protect
from oncekey.web.flask import protect as protect_flask

SECRET = "a secret for these tests alone"
SCOPE = "single-tenant"
Make = Callable[..., "Shop"]


class Shop:
    """An app on PostgreSQL with a cache, and the number of its charges."""

    def __init__(self, store: str, cache: str, **options: Any) -> None:
        self.charges = 0
        self.fail = False
        options = {"cache_secret": SECRET, **options}
        self.once = OnceKey(store, scope=SINGLE_TENANT, cache=cache, migrate=True, **options)
        self.app = FastAPI()

        @self.app.post("/payments", status_code=201)
        async def pay(request: Request) -> dict[str, int]:
            self.charges += 1
            if self.fail:
                raise RuntimeError("the bank is gone")
            return {"charge": self.charges}

        protect(self.app, self.once, upkeep=False)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://shop"
        )

    async def pay(self, key: str = "k-1", amount: int = 10) -> httpx.Response:
        return await self.client.post("/payments", json={"amount": amount}, headers={"Idempotency-Key": key})

    @property
    def cache(self) -> front.Cache:
        assert self.once.engine.cache is not None
        return self.once.engine.cache


@pytest.fixture
def url(postgres_url: str) -> str:
    return postgres_url


@pytest.fixture
async def make(url: str, redis_url: str) -> AsyncIterator[Make]:
    """Shops on the database of ``url``, unless the test names another."""
    made: list[Shop] = []

    def shop(store: str = url, cache: str = f"{redis_url}?timeout=5", **options: Any) -> Shop:
        made.append(Shop(store, cache, **options))
        return made[-1]

    yield shop
    for each in made:
        await each.client.aclose()
        await each.once.aclose()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


@pytest.fixture
def away(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    """A proxy in front of PostgreSQL."""
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
def cache_away(redis_server: RedisServer) -> Iterator[TcpProxy]:
    """A proxy in front of Redis."""
    with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


def replayed(answer: httpx.Response) -> bool:
    return answer.headers.get("idempotency-replayed") == "true"


async def test_replay_needs_no_statement_of_the_database(make: Make, away: TcpProxy, postgres_url: str) -> None:
    shop = make(store=away.rewrite(postgres_url))
    first = await shop.pay()
    shop.cache.flush()
    away.refuse()  # from here on a statement would be a 503
    for _ in range(3):
        again = await shop.pay()
        assert (again.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert shop.charges == 1


async def test_store_that_is_down_refuses_new_keys_and_leaves_cached_ones(
    make: Make, away: TcpProxy, postgres_url: str
) -> None:
    """docs/stores.md says so. Eight times: the breaker opens in between."""
    shop = make(store=away.rewrite(postgres_url))
    await shop.pay()
    shop.cache.flush()
    away.refuse()
    for number in range(8):
        assert (await shop.pay(f"k-new-{number}")).status_code == 503
        assert replayed(await shop.pay())
        assert (await shop.pay(amount=20)).status_code == 422
    assert shop.charges == 1


async def test_replay_in_a_second_process_comes_from_the_cache(make: Make, away: TcpProxy, postgres_url: str) -> None:
    first, second = make(), make(store=away.rewrite(postgres_url))
    await first.pay()
    first.cache.flush()
    await second.pay("k-other")  # opens the lanes
    away.refuse()
    assert replayed(await second.pay())
    assert (first.charges, second.charges) == (1, 1)


async def test_first_replay_of_a_row_that_is_not_in_the_cache_puts_it_there(
    make: Make, server: redis.Redis, away: TcpProxy, postgres_url: str
) -> None:
    shop = make(store=away.rewrite(postgres_url))
    await shop.pay()
    shop.cache.flush()
    server.flushall()
    assert replayed(await shop.pay())
    shop.cache.flush()
    away.refuse()
    assert replayed(await shop.pay())


async def test_cache_that_lost_everything_is_no_reason_to_run_again(make: Make, server: redis.Redis) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    server.flushall()
    assert replayed(await shop.pay())
    assert shop.charges == 1


async def test_other_request_with_a_cached_key_is_refused(make: Make) -> None:
    shop = make()
    await shop.pay(amount=10)
    shop.cache.flush()
    assert (await shop.pay(amount=11)).status_code == 422
    assert shop.charges == 1


async def test_entry_of_another_key_is_not_replayed(
    make: Make, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that can write to the cache copies one key's entry to another key."""
    shop = make()
    await shop.pay("k-1")
    await shop.pay("k-2", 20)
    shop.cache.flush()
    place = shop.once.store.identity()  # type: ignore[attr-defined]
    entry = server.get(name_of(place, SCOPE, "k-1"))
    assert entry is not None
    server.set(name_of(place, SCOPE, "k-2"), entry)
    assert (await shop.pay("k-2", 20)).json() == {"charge": 2}
    assert "not sealed with this process's cache_secret" in caplog.text


async def test_two_databases_that_share_a_cache_and_a_secret_share_no_answers(
    make: Make, postgres_server: PostgresServer
) -> None:
    """A settings file was copied: without the identity of the database, the second app would not run at all."""
    shop = make()
    staging = make(store=postgres_server.database("staging_of_the_cache"))
    assert (await shop.pay()).status_code == 201
    shop.cache.flush()
    answer = await staging.pay()
    assert (answer.status_code, replayed(answer), staging.charges) == (201, False, 1)


async def test_worker_with_another_secret_says_so_and_asks_the_database(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(), make(cache_secret="another secret of its own")
    await first.pay()
    first.cache.flush()
    assert replayed(await second.pay())
    assert second.charges == 0
    assert caplog.text.count("not sealed with this process's cache_secret") == 1


async def test_key_without_a_final_answer_is_not_in_the_cache(make: Make, server: redis.Redis) -> None:
    shop = make()
    shop.fail = True
    assert (await shop.pay()).status_code == 500
    shop.cache.flush()
    assert server.dbsize() == 0
    assert (await shop.pay()).status_code == 409  # unknown
    assert shop.charges == 1


async def test_cache_shows_neither_scope_nor_key(make: Make, server: redis.Redis) -> None:
    shop = make()
    await shop.pay("visible-key")
    shop.cache.flush()
    (name,) = server.keys()
    assert b"visible-key" not in name
    assert 0 < server.pttl(name) <= 60_000


def test_replay_of_a_sync_app_needs_no_statement_either(away: TcpProxy, postgres_url: str, redis_url: str) -> None:
    charges: list[int] = []
    app = Flask("shop")
    store = away.rewrite(postgres_url)
    with OnceKey(store, scope=SINGLE_TENANT, cache=f"{redis_url}?timeout=5", cache_secret=SECRET, migrate=True) as once:

        @app.post("/payments")
        def pay() -> tuple[dict[str, int], int]:
            charges.append(1)
            return {"charge": len(charges)}, 201

        protect_flask(app, once, upkeep=False)
        client = app.test_client()
        assert client.post("/payments", headers={"Idempotency-Key": "k-1"}).status_code == 201
        assert once.engine.cache is not None
        once.engine.cache.flush()
        away.refuse()
        again = client.post("/payments", headers={"Idempotency-Key": "k-1"})
        assert (again.status_code, again.headers["Idempotency-Replayed"]) == (201, "true")
        away.pass_through()


async def test_forget_through_the_engine_marks_the_key_in_the_cache(make: Make, server: redis.Redis) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    (row,) = shop.once.store.read([(SCOPE, "k-1")])
    assert row is not None
    behind = front.swap_behind(shop.cache, shop.once.store.swap)
    (gone,) = behind([swap(row, Event.FORGET, Actor.OPERATOR, audit=Audit("ops", "a test"))])
    assert gone is not None
    place = shop.once.store.identity()  # type: ignore[attr-defined]
    assert server.get(name_of(place, SCOPE, "k-1")) == front.MARK
    assert (await shop.pay()).json() == {"charge": 2}


# ---------------------------------------------------------------- the cache is down or slow


async def test_cache_that_refuses_costs_nothing_but_speed(
    make: Make, cache_away: TcpProxy, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache_away.refuse()
    shop = make(cache=cache_away.rewrite(redis_url))
    first = await shop.pay()
    assert first.status_code == 201
    again = await shop.pay()
    assert (again.content, replayed(again), shop.charges) == (first.content, True, 1)
    assert len([line for line in caplog.messages if "the cache does not answer" in line]) == 1


async def test_cache_whose_library_misbehaves_costs_nothing_but_speed(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def get(*_: Any) -> Any:
        raise TypeError("unexpected keyword argument")

    shop = make()
    first = await shop.pay()
    monkeypatch.setattr(InLoopRedisCache, "get", get)
    again = await shop.pay()
    assert (again.content, replayed(again), shop.charges) == (first.content, True, 1)
    assert len([line for line in caplog.messages if "the cache does not answer" in line]) == 1


async def test_write_that_the_cache_refuses_is_told_without_the_bytes_of_the_entry(
    make: Make, redis_server: RedisServer, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    shop = make()
    await shop.pay("k-0")
    server.config_set("maxmemory", "1")
    try:
        await shop.pay()
        shop.cache.flush()
        for _ in range(500):
            if caplog.messages:
                break
            await asyncio.sleep(0.01)
    finally:
        server.config_set("maxmemory", "0")
    (line,) = [line for line in caplog.messages if "the cache does not answer" in line]
    assert "command not allowed when used memory" in line
    assert line.isprintable()


async def test_cache_that_hangs_is_asked_once_and_then_left_alone(
    make: Make, cache_away: TcpProxy, redis_url: str
) -> None:
    shop = make(cache=cache_away.rewrite(redis_url) + "?timeout=1")
    await shop.pay("k-0")
    shop.cache.flush()
    cache_away.hang()
    began = time.monotonic()
    for number in range(1, 16):
        assert (await shop.pay(f"k-{number}")).status_code == 201
    assert time.monotonic() - began < 12  # fifteen questions of a second each would be longer, on any machine
    assert shop.cache.pauses


async def test_late_answer_of_the_cache_is_not_taken_for_that_of_another_key(
    make: Make, cache_away: TcpProxy, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "FIRST_PAUSE", 0.01)
    shop = make(cache=cache_away.rewrite(redis_url) + "?timeout=0.1")
    await shop.pay("k-1", 10)
    await shop.pay("k-2", 20)
    shop.cache.flush()
    cache_away.hang()
    assert (await shop.pay("k-1", 10)).json() == {"charge": 1}
    cache_away.pass_through()
    await asyncio.sleep(0.05)
    assert (await shop.pay("k-2", 20)).json() == {"charge": 2}


# ---------------------------------------------------------------- forget


def forget(store: str, cache: str, key: str = "k-1") -> str:
    done = CliRunner().invoke(
        cli, ["keys", "forget", key, "--store", store, "--cache", cache, "--yes", "--who", "ops", "--why", "a test"]
    )
    assert done.exit_code == 0, done.output
    return done.output


async def test_forgotten_key_runs_as_new_at_once(make: Make, postgres_url: str, redis_url: str) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    said = await asyncio.to_thread(forget, postgres_url, f"{redis_url}?timeout=5")
    assert f"the cache at {redis_url} had an answer to this key, and has a mark in its place\n" in said
    again = await shop.pay()
    assert (again.json(), replayed(again)) == ({"charge": 2}, False)


async def test_forget_with_another_database_of_redis_says_that_it_had_no_answer(
    make: Make, postgres_url: str, redis_url: str
) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    other = redis_url.replace("/0", "/1")
    said = await asyncio.to_thread(forget, postgres_url, f"{other}?timeout=5")
    assert f"the cache at {other} had no answer to this key" in said
    assert "another server or database number" in said
    assert replayed(await shop.pay())


async def test_forget_says_in_json_whether_the_cache_had_an_answer(
    make: Make, postgres_url: str, redis_url: str
) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    options = ["--store", postgres_url, "--cache", f"{redis_url}?timeout=5", "--yes", "--who", "o", "--why", "w"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["keys", "forget", "k-1", "--json", *options])
    assert json.loads(done.stdout)["cache"] == {"at": redis_url, "had_answer": True}


async def test_forget_with_the_cache_after_one_without_it_clears_the_cache(
    make: Make, postgres_url: str, redis_url: str
) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    arguments = ["--store", postgres_url, "--yes", "--who", "o", "--why", "w"]
    first = await asyncio.to_thread(CliRunner().invoke, cli, ["keys", "forget", "k-1", *arguments])
    assert (first.exit_code, "run this again with --cache URL" in first.stderr) == (0, True)
    assert replayed(await shop.pay())
    said = await asyncio.to_thread(forget, postgres_url, f"{redis_url}?timeout=5")
    assert "the store has no such key; no answer to it is replayed from the cache at" in said
    assert "run this again" not in said
    assert (await shop.pay()).json() == {"charge": 2}


async def test_forget_of_a_key_that_neither_store_nor_cache_has_is_an_error(
    make: Make, postgres_url: str, redis_url: str
) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    options = ["--store", postgres_url, "--cache", f"{redis_url}?timeout=5", "--yes", "--who", "o", "--why", "w"]
    misspelt = ["keys", "forget", "k-1", "--scope", "no-such-tenant", *options]
    for _ in range(2):
        done = await asyncio.to_thread(CliRunner().invoke, cli, misspelt)
        assert (done.exit_code, "in this scope" in str(done.exception)) == (1, True), done.output
        assert f"the cache at {redis_url} has no answer to it either" in done.stderr
    assert replayed(await shop.pay())


async def test_write_that_was_on_its_way_does_not_bring_a_forgotten_answer_back(
    make: Make, postgres_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = make()
    await shop.pay()
    shop.cache.flush()
    asked = front.clocks()
    (old,) = shop.once.store.read([(SCOPE, "k-1")])
    assert old is not None
    await asyncio.to_thread(forget, postgres_url, f"{redis_url}?timeout=5")
    monkeypatch.setattr(front, "MAX_AGE_SECONDS", 600.0)  # the mark alone must be enough, however slow the command was
    shop.cache.keep([old], asked)  # a lane had read the row before
    shop.cache.flush()
    assert (await shop.pay()).json() == {"charge": 2}
    assert (await shop.pay()).json() == {"charge": 2}


async def test_row_that_waited_too_long_is_not_written(
    make: Make, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "MAX_AGE_SECONDS", -1.0)
    shop = make()
    await shop.pay()
    shop.cache.flush()
    assert server.dbsize() == 0


async def test_forget_changes_nothing_if_the_cache_is_down(
    make: Make, postgres_url: str, cache_away: TcpProxy, redis_url: str
) -> None:
    shop = make()
    await shop.pay()
    cache_away.refuse()
    arguments = ["--store", postgres_url, "--cache", cache_away.rewrite(redis_url), "--yes", "--who", "o", "--why", "w"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["keys", "forget", "k-1", *arguments])
    assert done.exit_code == 1
    (row,) = shop.once.store.read([(SCOPE, "k-1")])
    assert row is not None
    assert row.state is State.COMPLETED


async def test_answer_is_replayed_for_its_time_to_live_after_a_forget_without_the_cache(
    make: Make, postgres_url: str
) -> None:
    """What the docs say of staleness: bounded by cache_ttl."""
    shop = make(cache_ttl=3)  # the command must end within it
    await shop.pay()
    shop.cache.flush()
    arguments = ["--store", postgres_url, "--yes", "--who", "o", "--why", "w"]
    await asyncio.to_thread(CliRunner().invoke, cli, ["keys", "forget", "k-1", *arguments])
    assert replayed(await shop.pay())
    await asyncio.sleep(3.05)
    assert (await shop.pay()).json() == {"charge": 2}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("store", "options", "words"),
    [
        ("postgresql://x@localhost/x", {"cache": "redis://localhost"}, "cache_secret"),
        ("postgresql://x@localhost/x", {"cache": "redis://localhost", "cache_secret": "short"}, "token_hex"),
        ("postgresql://x@localhost/x", {"cache": "memory://", "cache_secret": SECRET}, "redis://"),
        ("postgresql://x@localhost/x", {"cache": "redis+cluster://h:1", "cache_secret": SECRET}, "one server"),
        ("postgresql://x@localhost/x", {"cache": "redis://h", "cache_secret": SECRET, "cache_ttl": 0}, "cache_ttl"),
        ("postgresql://x@localhost/x", {"cache": "redis://h?timout=1", "cache_secret": SECRET}, "timout"),
        ("postgresql://x@localhost/x", {"cache": "redis://h?prefix=shop", "cache_secret": SECRET}, "prefix"),
        ("postgresql://x@localhost/x", {"cache": "redis://h?ssl_cert_reqs=none", "cache_secret": SECRET}, "ssl_cert"),
        ("postgresql://x@localhost/x", {"cache": "redis://h?decode_responses=1", "cache_secret": SECRET}, "decode_"),
        ("memory://", {"cache": "redis://localhost", "cache_secret": SECRET}, "slower"),
    ],
)
def test_wrong_setting_is_refused_with_what_to_write(store: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OnceKey(store, scope=SINGLE_TENANT, **options)
