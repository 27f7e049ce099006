"""The campaign's faults on MySQL (MariaDB here): kills, pauses, crowds, and the outbox under kills.

``ONCEKEY_MYSQL_SCALE=1`` runs the counts of the long form; without it, a part of them.
"""

from __future__ import annotations

import os
import random
from itertools import count
from pathlib import Path

import pytest

from oncekey.testing.servers import MysqlServer
from tests.faults import crowds, kills, outbox, pauses
from tests.faults.campaign import Fault, Run

pytestmark = pytest.mark.stores
_numbers = count(1)
LONG = {
    "kill -9 at random under load": 1_000,
    "SIGSTOP at a point, past the lease": 200,
    "SIGSTOP at random under load": 200,
    "64 clients on one key, linearizable": 2_000,
    "outbox: kill, late commit, poison": 10_000,
}
FAULTS = [*kills.FAULTS, *pauses.FAULTS, *crowds.FAULTS, *outbox.FAULTS]


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault(fault: Fault, mysql_server: MysqlServer, tmp_path: Path) -> None:
    scale = float(os.environ.get("ONCEKEY_MYSQL_SCALE", "0.02"))
    goal = max(fault.short, round(LONG[fault.name] * scale))
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    run = Run("mysql", goal, seed, tmp_path, lambda: mysql_server.database(f"fault_{next(_numbers)}"))
    fault.run(run)
    print(fault.name, run.hits, fault.unit, run.requests, "requests", run.notes)
    assert not run.violations, f"seed {seed}\n" + "\n".join(run.violations)
    assert run.hits >= run.count, f"seed {seed}: only {run.hits} of {run.count} {fault.unit} were hit"
