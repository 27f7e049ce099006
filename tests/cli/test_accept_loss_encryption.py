"""``oncekey migrate --accept-loss``: its reason is never plain text beside encrypted values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from oncekey.encryption.store import sealed
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.buckets import Names, bucket_of, name_of
from oncekey.stores.redis.epochs import EPOCH_NAME
from tests.cli.key_table import Run, runner
from tests.cli.test_re_encrypt import entry
from tests.encryption.kept_rows import SCOPE, put
from tests.encryption.rings import ring

SURE = ("migrate", "--accept-loss", "--yes", "--why", "the disk of ACME is gone", "--who", "ana")
_BUCKET = Names("oncekey").epochs


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    made = RedisStore(redis_url)
    made.init()
    yield made
    made.close()


@pytest.fixture
def run(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    return runner(redis_url, monkeypatch, capsys)


def lose(redis_url: str) -> None:
    """The epoch of a bucket without one of the rows."""
    used = {bucket_of(name_of(SCOPE, f"one-{name}")) for name in ("done", "unknown", "half", "running")}
    with redis.Redis.from_url(redis_url) as client:
        client.delete(next(name for bucket, name in enumerate(_BUCKET) if bucket not in used))


def test_command_without_a_keyring_is_refused_where_encrypted_values_are_left(
    store: RedisStore, run: Run, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(sealed(store, ring(1)), "one", version=258)
    lose(redis_url)
    code, _, error = run(*SURE)
    assert code == 1
    assert "nothing was changed: what is left in this store is encrypted (key 1)" in error
    assert "set ONCEKEY_KEYS to the keyring of the app" in error
    assert run("migrate")[0] == 1  # the loss is not accepted

    monkeypatch.setenv("ONCEKEY_KEYS", entry(1))
    assert run(*SURE)[0] == 0
    again = RedisStore(redis_url)
    (line,) = again.audit(*EPOCH_NAME, 10)
    assert "ACME" not in line.why
    assert "the disk of ACME is gone" in sealed(again, ring(1)).audit(*EPOCH_NAME, 10)[0].why
    again.close()


def test_command_without_a_keyring_goes_on_where_nothing_is_encrypted_and_says_what_it_keeps(
    store: RedisStore, run: Run, redis_url: str
) -> None:
    put(store, "one")
    lose(redis_url)
    code, _, error = run("migrate", "--accept-loss", said="the disk\nno\n")
    assert (code, "No keyring is given, so the reason is kept as plain text" in error) == (1, True)
    assert run(*SURE)[0] == 0
