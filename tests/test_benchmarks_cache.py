"""The benchmark's contestant with a cache: PostgreSQL's statements are counted, and none of them is overlooked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

pytest.importorskip("uvicorn", reason="the benchmark serves its apps with uvicorn")
pytest.importorskip("starlette", reason="the benchmarked app is a Starlette app")

from benchmarks import load, one_load, report, statements, targets
from benchmarks.contestants import ONCEKEY_POSTGRES_CACHE, cannot_run
from benchmarks.places import DATABASES, READER, Places
from benchmarks.report import Sample
from benchmarks.serving import serving
from benchmarks.workloads import WORKLOADS, chosen
from oncekey.testing.servers import PostgresServer, RedisServer, ServerUnavailable, find_postgres


def test_one_statement_in_one_round_misses_the_target_of_the_cache() -> None:
    title = "replays from a cache: statements of PostgreSQL, in all"
    for counts, reached in (([0, 0, 0], "yes"), ([0, 1, 0], "no"), ([None], "not measured")):
        name = ONCEKEY_POSTGRES_CACHE.name
        samples = [Sample(targets.REPLAY, name, number, 1.0, statements=n) for number, n in enumerate(counts)]
        outcomes = {outcome.title: outcome.reached for outcome in targets.outcomes(samples)}
        assert outcomes[title] == reached
        [line] = report.summary(samples)
        assert line.statements == max((n for n in counts if n is not None), default=None)


def test_contestant_with_a_cache_runs_in_replays_only_and_needs_redis(tmp_path: Path) -> None:
    cached = ONCEKEY_POSTGRES_CACHE
    assert (cached.name, cached.servers) == ("oncekey postgres+cache", ("postgres", "redis"))
    assert [workload.id for workload, able in chosen(set()) if cached in able] == [targets.REPLAY]
    assert [workload.id for workload, able in chosen(set(), targets=True) if cached in able] == [targets.REPLAY]
    at = Places(tmp_path, {"postgres-cache": "postgresql://"}, {"redis": "no redis-server found"})
    assert cannot_run(cached, at) == "no redis-server found"


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """A PostgreSQL that counts statements, as in a run of the benchmark."""
    try:
        if reason := statements.missing(find_postgres()):
            pytest.skip(reason)
        with PostgresServer(fsync=False, settings=statements.SETTINGS) as server:
            database = DATABASES["postgres-cache"]
            urls = {"postgres-cache": server.database(database), "postgres-statements": server.database(READER)}
            statements.watch(server, database, READER)
            yield Places(tmp_path_factory.mktemp("places"), urls, {}, postgres_pid=server.pid)
    except ServerUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.stores
def test_only_statements_of_the_watched_database_count(counting: Places) -> None:
    watched, reader = counting.urls["postgres-cache"], counting.urls["postgres-statements"]
    before = statements.count(reader, DATABASES["postgres-cache"])
    with psycopg.connect(watched, autocommit=True) as connection:
        for number in range(3):
            connection.execute("SELECT %s::int", (number,))
    with psycopg.connect(reader, autocommit=True) as connection:
        connection.execute("SELECT 1")
    assert statements.count(reader, DATABASES["postgres-cache"]) == before + 3


@pytest.mark.skipif(load.compiler() is None, reason="no C compiler for benchmarks/load.c")
@pytest.mark.stores
@pytest.mark.parametrize("there", [True, False], ids=["with a cache", "cache is down"])
def test_statements_of_replays_are_none_with_a_cache_and_are_counted_without_it(
    tmp_path: Path, counting: Places, redis_server: RedisServer, there: bool
) -> None:
    generator = load.compile_generator(tmp_path)
    [replay] = [workload for workload in WORKLOADS if workload.id == targets.REPLAY]
    cache = f"{redis_server.url}?timeout=5" if there else "redis://127.0.0.1:1"
    with serving(store=counting.urls["postgres-cache"], guard="oncekey", cache=cache) as served:
        loaded = one_load.one_load(counting, generator, replay, ONCEKEY_POSTGRES_CACHE, served, seconds=0.5, warmup=0.1)
    assert loaded.statements is not None
    assert (loaded.statements == 0) == there
    assert loaded.measured.replayed == loaded.measured.requests


def test_count_that_does_not_move_while_keys_are_new_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(statements, "count", lambda reader, database: 7)
    monkeypatch.setattr(one_load, "FILL_SECONDS", 0.0)
    with pytest.raises(load.LoadFailed, match="the count says nothing"):
        one_load._fill_cache(Places(tmp_path, {"postgres-statements": "postgresql://"}, {}), lambda **lengths: None)  # type: ignore[arg-type]
    assert one_load._fill_cache(Places(tmp_path, {}, {}), lambda **lengths: None) is None  # type: ignore[arg-type]
