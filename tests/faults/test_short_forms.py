"""Every fault of the campaign with its short count, on one of its stores: they take turns down the table.

On all of them: ``python -m tests.faults --short``. The long form is ``make faults``. A seed is in what fails.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from oncekey.testing.servers import PostgresServer
from tests.faults.campaign import Fault, Run
from tests.faults.table import faults

_numbers = count(1)
OF_ONE_SERVER = ("PostgreSQL", "Redis", "DynamoDB")
"""Faults whose names begin so stop or cut one kind of server: `make stores` has them."""
SHORT = [
    pytest.param(
        fault,
        store,
        id=f"{fault.name}-{store}".replace(" ", "_"),
        marks=[pytest.mark.stores] if fault.name.startswith(OF_ONE_SERVER) else [],
    )
    for number, fault in enumerate(faults())
    for stores in [fault.usual_stores]
    if fault.short and stores
    for store in [stores[number % len(stores)]]
]
SERVERS = [
    pytest.param(fault, store, id=f"{fault.name}-{store}".replace(" ", "_"))
    for fault in faults()
    for store in ("redis", "dynamodb")
    if fault.short and store in fault.counts and store not in fault.usual_stores
]


@pytest.fixture
def make_database(request: pytest.FixtureRequest) -> Callable[[], str]:
    def make() -> str:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return server.database(f"short_{next(_numbers)}")

    return make


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("fault", "store"), SHORT)
def test_short(fault: Fault, store: str, make_database: Callable[[], str], tmp_path: Path) -> None:
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    run = Run(store, min(fault.short, fault.counts[store]), seed, tmp_path, make_database)
    try:
        fault.run(run)
    finally:
        run.close()
    assert not run.violations, f"seed {seed}\n" + "\n".join(run.violations)
    assert run.hits >= run.count, f"seed {seed}: only {run.hits} of {run.count} {fault.unit} were hit"


@pytest.mark.stores
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "store"), SERVERS)
def test_short_on_redis_and_dynamodb(fault: Fault, store: str, tmp_path: Path) -> None:
    test_short(fault, store, lambda: "", tmp_path)
