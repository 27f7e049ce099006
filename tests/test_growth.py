"""The growth benchmark's own parts: what it fills is what the product finds, and what it must notice it does notice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest

from benchmarks import capacity, growth, growth_costs, growth_plans
from benchmarks.growth_fill import Shape, fill, replayable_key
from benchmarks.growth_rounds import BATCH, FINGERPRINT, Subject
from benchmarks.store_alone import PairFailed
from oncekey.core.states import State
from oncekey.testing.servers import PostgresServer

SHAPE = Shape(4_000, FINGERPRINT)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'growth.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


def test_filled_store_has_the_keys_that_the_product_finds(url: str) -> None:
    """Twice, since the small stores are filled anew; then every kind of work once."""
    for _ in range(2):
        fill(url, SHAPE, lambda _: None)
    subject = Subject(url, SHAPE)
    try:
        counts = subject.store.counts().counts
        assert sum(counts.values()) == SHAPE.keys
        assert counts[State.UNKNOWN] > 0
        assert counts[State.IN_PROGRESS] > 0
        (record,) = subject.store.read([(SHAPE.tenant_of(7), replayable_key(7))])
        assert record is not None
        assert record.fingerprint == FINGERPRINT
        assert len(record.key) == 36
        assert record.response is not None
        assert 150 < len(record.response.body or b"") < 350
        took = asyncio.run(growth.one_round({SHAPE.keys: subject}, 0, None, slices=1))
        assert all(value > 0 for value in took[SHAPE.keys].values())
        assert subject.store.purge(2 * BATCH) == SHAPE.due - BATCH  # one was reaped, and no other key is due
        with pytest.raises(PairFailed, match="not enough to reap"):
            subject.reap()
        with pytest.raises(PairFailed, match="replayed: False"):
            asyncio.run(subject.request("tenant-1", "a-key-that-is-new", replay=True))
    finally:
        subject.close()


def test_growth_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    """A rate below, or a time above, what is wanted of the largest; ratios are taken inside a round."""
    flat = dict.fromkeys([*growth.RATES, *growth.TIMES], 100.0)
    noisy = dict.fromkeys([*growth.RATES, *growth.TIMES], 50.0)
    assert growth.report("x", {10: [flat, noisy], 1000: [flat, noisy]})
    assert not growth.report(
        "x", {10: [flat, noisy], 1000: [flat | {"first request": 80.0}, noisy | {"first request": 44.0}]}
    )
    assert not growth.report("x", {10: [flat], 1000: [flat | {"reap of 500": 121.0}]})
    assert "MISSED: <= 1.2" in capsys.readouterr().out


def test_every_statement_reads_no_more_than_its_batch(postgres_url: str) -> None:
    fill(postgres_url, SHAPE, lambda _: None)
    found = growth_plans.look_at(postgres_url, lambda _: None)
    assert {"reserve", "complete", "replay", "sweep", "purge", "health"} <= {each.verb for each in found}
    assert growth_plans.report({SHAPE.keys: found})
    whole = growth_plans.Read("planted", 5_000, 10_000, ("idempotency_keys",), (), 1.0)
    wide = growth_plans.Read("planted", 5_000, 4_000, (), (), 1.0)
    assert not growth_plans.report({SHAPE.keys: [*found, whole]})
    assert not growth_plans.report({SHAPE.keys: [*found, wide]})


def test_costs_are_counted_from_the_log(postgres_server: PostgresServer, postgres_url: str) -> None:
    """Two commits and two round trips for a batch of one, and a replay writes nothing."""
    fill(postgres_url, SHAPE, lambda _: None)
    store = growth_costs.Counting(postgres_url)
    try:
        meter = growth_costs.Meter(postgres_server, store)
    except psycopg.errors.FeatureNotSupported as missing:
        pytest.skip(str(missing))
    try:
        one = growth_costs._counted(meter, "first", 1, 1, 20, lambda: growth_costs._pairs(store, 1, 20))
        assert one.statements == 2.0
        assert one.commits == pytest.approx(2.0, abs=0.2)
        assert 500 < one.wal_bytes - one.image_bytes < 5_000
        replay = growth_costs._counted(meter, "replay", 1, 64, 64, lambda: growth_costs._replays(store, SHAPE, 64))
        assert replay.statements == pytest.approx(1 / 64)
        assert replay.wal_bytes < one.wal_bytes / 10
    finally:
        meter.close()
        store.close()


def test_batches_grow_with_the_load_and_the_nearest_limit_is_named() -> None:
    constants, machine = capacity.Constants(), capacity.Machine()
    quiet, busy = (capacity.simulate(rate, 2, machine, constants, 4_000) for rate in (100, 8_000))
    assert quiet.batch < 1.2
    assert busy.batch > 3
    assert busy.cores < 80 * quiet.cores  # eighty times the requests, and each costs less
    small = capacity.Machine(memory_gb=8.0)
    step = capacity.plan(3_000, constants, small, 24.0)
    assert step.servers > 1
    assert step.tightest.startswith("index in memory")
    assert capacity.show([step]).count("\n") == 2


def test_table_in_the_docs_equals_the_simulation() -> None:
    text = (Path(__file__).parents[1] / "docs/scaling.md").read_text()
    assert capacity.show(capacity.table(capacity.Constants(), capacity.Machine(), 24.0)) in text
