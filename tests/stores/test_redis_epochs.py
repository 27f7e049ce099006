"""A Redis that lost its data fails closed, and only an operator makes it take requests again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.errors import SchemaError, StoreError, StoreUnavailable
from oncekey.stores.redis import RedisStore, scripts
from oncekey.stores.redis.buckets import BUCKETS, Names, bucket_of, name_of
from oncekey.stores.redis.scripts import Script
from oncekey.telemetry.redaction import describe
from oncekey.testing.company import in_threads
from oncekey.testing.conformance.base import one
from tests.cli.key_table import runner
from tests.engine.doubles import reservation

pytestmark = pytest.mark.stores

_WHY = Audit("ana", "the disk is gone")
_EPOCHS = Names("oncekey").epochs
_SCRIPTS = [value for value in vars(scripts).values() if isinstance(value, Script)]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    made = RedisStore(redis_url)
    made.init()
    yield made
    made.close()


@pytest.fixture
def make(redis_url: str) -> Iterator[Callable[..., RedisStore]]:
    """Makes stores over the same Redis, without an init."""
    made: list[RedisStore] = []

    def new(options: str = "") -> RedisStore:
        made.append(RedisStore(redis_url + options))
        return made[-1]

    yield new
    for each in made:
        each.close()


def _rows(client: redis.Redis) -> int:
    return len(client.keys("*:k:*"))


# ---------------------------------------------------------------- a new Redis


@pytest.mark.parametrize("verb", ["migrate", "check", "reserve"])
def test_empty_redis_is_refused_and_the_message_says_what_to_run(
    make: Callable[..., RedisStore], client: redis.Redis, verb: str
) -> None:
    """A plain migrate never writes an epoch: it cannot tell a new Redis from one that lost everything."""
    store = make()
    with pytest.raises(SchemaError, match="run `oncekey migrate --init`"):
        store.reserve([reservation("k")]) if verb == "reserve" else getattr(store, verb)()
    assert client.dbsize() == 0


def test_init_writes_one_epoch_into_every_bucket(make: Callable[..., RedisStore], client: redis.Redis) -> None:
    first = make().init()
    assert {client.get(name) for name in _EPOCHS} == {first.encode()}
    assert make().init() == first, "a second init changes nothing"
    assert make().migrate() == []


def test_init_from_many_threads_agrees_on_one_epoch(make: Callable[..., RedisStore]) -> None:
    store = make()
    assert len(set(in_threads(store, lambda _: RedisStore.init(store), 8))) == 1


def test_init_of_redis_that_lost_one_bucket_is_refused(
    store: RedisStore, make: Callable[..., RedisStore], client: redis.Redis
) -> None:
    """It is not new: part of its data is gone."""
    client.delete(_EPOCHS[3])
    with pytest.raises(SchemaError, match="has lost keys"):
        make().init()
    assert client.get(_EPOCHS[3]) is None


def test_init_of_emptied_redis_is_refused_if_the_url_names_an_epoch(
    make: Callable[..., RedisStore], client: redis.Redis
) -> None:
    epoch = make().init()
    make(f"?epoch={epoch}").init()
    client.flushall()
    with pytest.raises(SchemaError, match=rf"the URL names one \({epoch}\): it has lost keys.*--accept-loss"):
        make(f"?epoch={epoch}").init()
    assert client.dbsize() == 0, "nothing was written, so requests are still refused"
    assert make(f"?epoch={epoch}").accept_loss(_WHY) != epoch


@pytest.mark.parametrize("kept", ["a key", "an audit"])
def test_init_of_redis_with_keys_and_without_epochs_is_refused(
    store: RedisStore, make: Callable[..., RedisStore], client: redis.Redis, kept: str
) -> None:
    if kept == "a key":
        store.reserve([reservation("k")])
    else:
        store.accept_loss(_WHY)
    client.delete(*_EPOCHS)
    with pytest.raises(SchemaError, match=r"has keys of oncekey, and no epoch: it has lost keys.*--accept-loss"):
        make().init()
    assert client.exists(*_EPOCHS) == 0


# ---------------------------------------------------------------- a loss


def test_redis_emptied_under_a_running_process_is_refused(store: RedisStore, client: redis.Redis) -> None:
    record = one(store.reserve([reservation("k")])[0].record)
    client.flushall()
    with pytest.raises(SchemaError, match=r"has lost keys.*--accept-loss"):
        store.reserve([reservation("k")])
    with pytest.raises(SchemaError):
        store.swap([swap(record, Event.COMPLETE, Actor.OWNER)])
    with pytest.raises(SchemaError):
        store.check()
    assert client.dbsize() == 0, "nothing was written"


def test_one_emptied_bucket_is_refused(store: RedisStore, client: redis.Redis) -> None:
    bucket = bucket_of(name_of("tenant", "k"))
    client.delete(_EPOCHS[bucket])
    with pytest.raises(SchemaError, match="has lost keys"):
        store.reserve([reservation("k", scope="tenant")])
    assert _rows(client) == 0


def test_redis_that_was_set_up_again_is_refused_by_a_process_that_knows_the_old_epoch(
    store: RedisStore, make: Callable[..., RedisStore], client: redis.Redis
) -> None:
    store.reserve([reservation("k")])
    client.flushall()
    new = make().init()
    with pytest.raises(SchemaError, match=f"has another epoch than this process knows, epoch {new}:") as caught:
        store.reserve([reservation("k")])
    assert f"epoch {new}:" in describe(caught.value), "the log does not mask it"
    assert _rows(client) == 0


def test_epoch_in_the_url_refuses_every_other_epoch(make: Callable[..., RedisStore]) -> None:
    epoch = make().init()
    make(f"?epoch={epoch}").check()
    for verb in (lambda store: store.check(), lambda store: store.reserve([reservation("k")])):
        with pytest.raises(SchemaError, match="has another epoch"):
            verb(make("?epoch=1-0123456789abcdef"))


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.name)
@pytest.mark.parametrize("epoch", [None, b"1-another"])
def test_every_script_refuses_a_bucket_without_its_epoch(
    redis_url: str, client: redis.Redis, script: Script, epoch: bytes | None
) -> None:
    client.flushall()
    if epoch:
        client.set(_EPOCHS[0], epoch)
    before = client.dbsize()
    with pytest.raises(redis.ResponseError, match="ONCEKEY-EPOCH"):
        client.eval(script.text.decode(), 2, _EPOCHS[0], b"oncekey:{0146}:k:a\0b", b"1-known", b"1", *[b"1"] * 12)
    assert client.dbsize() == before


def test_accepted_loss_is_audited_and_needs_a_restart(
    store: RedisStore, make: Callable[..., RedisStore], client: redis.Redis
) -> None:
    store.reserve([reservation("k")])
    for bucket in BUCKETS[:4]:
        client.delete(_EPOCHS[bucket])
    epoch = make().accept_loss(_WHY)
    with pytest.raises(SchemaError, match="restart the app"):
        store.reserve([reservation("k")])
    again = make()
    again.check()
    (line,) = again.audit("", "oncekey:epoch", 10)
    assert (line.who, line.event, line.after) == ("ana", "accept_loss", epoch)
    assert line.why == "4 of 16 buckets: the disk is gone"


def test_loss_that_could_not_be_audited_is_not_accepted(
    make: Callable[..., RedisStore], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().init()
    client.flushall()
    operator = make()
    with monkeypatch.context() as patched:
        patched.setattr(operator, "_run", _fail)
        with pytest.raises(StoreUnavailable):
            operator.accept_loss(_WHY)
    for verb in (lambda store: store.check(), lambda store: store.reserve([reservation("k")])):
        with pytest.raises(SchemaError, match="--accept-loss"):
            verb(make())
    assert _rows(client) == 0
    epoch = operator.accept_loss(_WHY)
    assert [line.after for line in operator.audit("", "oncekey:epoch", 10)] == [epoch]


def _fail(*given: object, **more: object) -> None:
    raise StoreUnavailable("cut off")


# ---------------------------------------------------------------- eviction


@pytest.fixture
def evicting(redis_url: str, client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory-policy", "allkeys-lru")
    yield
    client.config_set("maxmemory-policy", "noeviction")


def test_redis_that_evicts_keys_is_refused(store: RedisStore, evicting: None, make: Callable[..., RedisStore]) -> None:
    for each in (make().check, lambda: make().reserve([reservation("k")])):
        with pytest.raises(SchemaError, match="maxmemory-policy is allkeys-lru"):
            each()
    assert "allkeys-lru" in store.diagnose()[0].found


@pytest.mark.parametrize(("denied", "words"), [("-config", "is allkeys-lru"), ("-info", "is not told")])
def test_eviction_policy_is_read_where_config_is_not_allowed(
    evicting: None, redis_url: str, client: redis.Redis, denied: str, words: str
) -> None:
    """And where the server does not tell it at all, oncekey does not begin either."""
    client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", denied)
    store = RedisStore(redis_url.replace("redis://", "redis://app:pw@"))
    try:
        with pytest.raises(SchemaError, match=words):
            store.init()
    finally:
        store.close()
        client.execute_command("ACL", "DELUSER", "app")


# ---------------------------------------------------------------- the command line


def test_command_line_sets_up_a_new_redis_and_accepts_a_loss(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(redis_url, monkeypatch, capsys)
    code, _, said = run("migrate")
    assert (code, "run `oncekey migrate --init`" in said) == (1, True)
    code, shown, _ = run("migrate", "--init")
    (epoch,) = {str(client.get(name))[2:-1] for name in _EPOCHS}
    assert (code, f"?epoch={epoch}" in shown) == (0, True)
    assert shown.startswith(f"{redis_url}: is set up, with epoch {epoch}\n")
    assert "up to date" not in shown
    assert run("migrate") == (0, f"{redis_url}: up to date\n", "")
    client.delete(_EPOCHS[5])
    for words in (["migrate"], ["migrate", "--init"]):
        code, _, said = run(*words)
        assert (code, "--accept-loss" in said) == (1, True)
    code, shown, _ = run("migrate", "--accept-loss", "--yes", "--why", "disk")
    assert (code, epoch in shown) == (0, False)
    assert shown.startswith(f"{redis_url}: has a new epoch, ")
    assert ("up to date" in shown, "at its start or first request" in shown) == (False, True)


def test_accept_loss_on_a_store_without_epochs_is_refused(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(f"sqlite:///{tmp_path}/keys.db", monkeypatch, capsys)
    code, _, said = run("migrate", "--accept-loss", "--yes", "--why", "disk")
    assert (code, "no epoch" in said) == (1, True)
    assert run("migrate", "--init")[0] == 0


def test_scope_with_nul_is_refused(store: RedisStore) -> None:
    """NUL stands between scope and key in a name."""
    with pytest.raises(StoreError, match="NUL"):
        store.reserve([reservation("k", scope="a\0b")])
