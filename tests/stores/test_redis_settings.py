"""URLs of Redis, what its Capabilities say, and what is refused when the app is made."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.diagnosis import Level
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.redis import RedisStore, urls
from oncekey.stores.redis.buckets import SLOTS, TAGS
from oncekey.stores.registry import WITH_TRANSACTIONS, open_store
from oncekey.testing.conformance.base import RESPONSE
from tests.engine.doubles import reservation

pytestmark = pytest.mark.stores


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", {"kind": "server", "hosts": (("h", 6379),)}),
        ("redis://h:1/2", {"hosts": (("h", 1),)}),
        ("redis://[::1]:7/0", {"hosts": (("::1", 7),)}),
        ("rediss://u:p@h:1/0?ssl_check_hostname=false", {"kind": "server"}),
        ("redis+cluster://a:1,b:2,c", {"kind": "cluster", "hosts": (("a", 1), ("b", 2), ("c", 6379))}),
        ("redis+sentinel://a,b:2/main/3", {"kind": "sentinel", "hosts": (("a", 26379), ("b", 2)), "name": "main"}),
        ("redis://h?replicas=2&replicas_timeout=0.5&timeout=3", {"replicas": 2, "replicas_timeout": 0.5, "timeout": 3}),
        ("redis://h?timeout=1", {"replicas_timeout": 0.5, "timeout": 1}),
        ("redis://h?epoch=1-a&prefix=shop", {"epoch": "1-a", "prefix": "shop"}),
        ("redis://h", {"epoch": None, "prefix": "oncekey", "replicas": 0, "replicas_timeout": 1.0, "timeout": 5.0}),
    ],
)
def test_url_is_read(url: str, expected: dict[str, Any]) -> None:
    settings = urls.read(url)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_url_keeps_login_database_and_tls() -> None:
    options = urls.read("rediss://me:s%40cret@h:1/2?ssl_cert_reqs=none").options
    assert (options["username"], options["password"], options["db"]) == ("me", "s@cret", 2)
    assert (options["connection_class"].__name__, options["ssl_cert_reqs"]) == ("SSLConnection", "none")
    with closing(open_store("rediss+cluster://me:pw@h:1")) as store:
        assert isinstance(store, RedisStore)
        assert store.settings.options["connection_class"].__name__ == "SSLConnection"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h:port/0", "cannot be read"),
        ("redis://h?timeout=soon", "timeout= takes a number"),
        ("redis+sentinel://h:1", "master's name"),
        ("redis+cluster://h:1/3", "no database"),
        ("redis://h?replicas=-1", "replicas= takes"),
        ("redis://h?replicas=0.5", "replicas= takes"),
        ("redis://h?replicas=1&replicas_timeout=9", "replicas_timeout="),
        ("redis://h?timeout=inf", "timeout= takes"),
        ("redis://h?timeout=0", "timeout= takes"),
        ("redis://h/shop", "number of a database"),
        ("redis://h?prefix={shop}", "prefix= takes no braces"),
        ("redis://h?nonsense=1", "neither oncekey nor redis-py knows: nonsense"),
    ],
)
def test_url_that_makes_no_sense_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        OnceKey(url.replace("://", "://me:hunter2@"), scope=SINGLE_TENANT)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [("/99", "no database of this number"), ("me:wrong@", "correct the user's name or password")],
)
def test_refused_log_in_says_what_to_correct(redis_url: str, url: str, words: str) -> None:
    wrong = redis_url.replace("/0", url) if url.startswith("/") else redis_url.replace("://", f"://{url}")
    with closing(open_store(wrong)) as store, pytest.raises(StoreUnavailable, match=words):
        store.check()


def test_redis_that_is_full_says_so(ready_redis_url: str, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.config_set("maxmemory", "1")
    try:
        with closing(open_store(ready_redis_url)) as store, pytest.raises(StoreUnavailable, match="memory is full"):
            store.reserve([reservation("k-1")])
    finally:
        client.config_set("maxmemory", "0")
        client.close()


def test_redis_that_may_lose_confirmed_writes_is_named_in_the_log_once(
    ready_redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store(ready_redis_url)) as store:
        store.check()
        store.check()
    assert caplog.text.count("may lose what it has confirmed") == 1


def test_password_is_in_no_message() -> None:
    settings = urls.read("redis+sentinel://me:hunter2@h:1/main?sentinel_password=hunter3")
    assert "hunter" not in settings.where + repr(settings)


def test_slots_of_the_tags_lie_evenly() -> None:
    """Wherever a cluster cuts its slots, each of up to sixteen masters has its share of the buckets."""
    assert [key_slot(f"oncekey:{{{tag}}}:k:x".encode()) for tag in TAGS] == list(SLOTS)
    assert [slot // 1024 for slot in SLOTS] == list(range(16))


def test_transactional_route_on_redis_is_refused_when_the_app_is_made() -> None:
    """The message names the stores that can."""
    policy = Policy(effects="transactional")
    url = "redis://localhost:1/0"
    for given in ({"policy": policy}, {"routes": {"POST /payments": policy}}):
        with pytest.raises(ConfigurationError, match="effects='transactional'") as caught:
            OnceKey(url, scope=SINGLE_TENANT, **given)
        assert WITH_TRANSACTIONS in str(caught.value)
    with OnceKey(url, scope=SINGLE_TENANT) as once, pytest.raises(ConfigurationError, match="postgresql://"):
        once.policy(effects="transactional")


def test_user_with_the_documented_permissions_can_do_everything(redis_url: str) -> None:
    """The line of docs/stores.md is what an operator copies."""
    page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text("utf-8")
    (line,) = re.findall(r"`(\+@read [^`]+)`", page)
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~oncekey:*", "-@all", *line.split())
        try:
            with closing(RedisStore(redis_url.replace("redis://", "redis://app:pw@"))) as store:
                store.init()
                record = store.reserve([reservation("k")])[0].record
                assert record is not None
                assert store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]) != [None]
                assert [row.key for row in store.listing()] == ["k"]
                assert store.counts().counts[State.COMPLETED] == 1
                assert store.purge(10) == 0
                assert Level.FAIL not in {line.level for line in store.diagnose()}
        finally:
            client.execute_command("ACL", "DELUSER", "app")


def test_write_without_its_replica_does_not_count(ready_redis_url: str) -> None:
    """There is no replica: a reservation raises, also when it is asked for again and finds its own row."""
    wanted = reservation("k")
    with closing(RedisStore(f"{ready_redis_url}?replicas=1&replicas_timeout=0.05")) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="0 of 1 replicas confirmed"):
                store.reserve([wanted])
