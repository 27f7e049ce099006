"""The cache in front of an encrypted store: its server sees no more than the store does."""

from __future__ import annotations

import psycopg

from oncekey.encryption import Keyring
from tests.encryption import dumps
from tests.encryption.full_run import FullRun, planted
from tests.encryption.rings import ONE, ring

OPENS = Keyring({1: ONE}, encrypt=False)


async def test_cache_has_no_planted_secret_and_replays_from_it(ready_url: str, redis_url: str) -> None:
    run = FullRun(ready_url, ring(1), None, cache=f"{redis_url}?timeout=5", cache_secret="a secret of this test")
    for _ in range(2):  # through a lane, and through the event loop
        for key in ("flat-1", "flat-2"):
            await run.post("flat", key)
    cache = run.once.engine.cache
    assert cache is not None
    cache.flush()
    dump = dumps.of_redis(redis_url)
    assert dump.count(b"oncekey-cache:") == 2
    assert run.found_in(dump) == set()
    with psycopg.connect(ready_url) as own:
        own.execute("DELETE FROM idempotency_keys")
    for key in ("flat-1", "flat-2"):
        again = await run.post("flat", key)
        assert (again.headers.get("idempotency-replayed"), again.json()) == ("true", {"secret": planted("flat-body")})
        assert again.headers["x-secret"] == planted("flat-header")
    await run.close()


async def test_processes_of_a_deploy_that_switches_encryption_on_replay_each_others_entries(
    ready_url: str, redis_url: str
) -> None:
    options = {"cache": f"{redis_url}?timeout=5", "cache_secret": "a secret of this test"}
    opens, encrypts = (FullRun(ready_url, keyring, None, **options) for keyring in (OPENS, ring(1)))
    for run, key in ((opens, "flat-1"), (encrypts, "flat-2")):
        await run.post("flat", key)
        await run.post("flat", key)
        assert run.once.engine.cache is not None
        run.once.engine.cache.flush()
    with psycopg.connect(ready_url) as own:
        own.execute("DELETE FROM idempotency_keys")
    for run, key in ((encrypts, "flat-1"), (opens, "flat-2")):
        again = await run.post("flat", key)
        assert (again.headers.get("idempotency-replayed"), again.json()) == ("true", {"secret": planted("flat-body")})
    for run in (opens, encrypts):
        await run.close()
