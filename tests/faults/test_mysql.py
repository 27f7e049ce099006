"""The campaign's faults on MySQL (MariaDB here), each with its short count. ``make faults ARGS="--store mysql"`` runs
the long counts, and ``ONCEKEY_MYSQL=mysql`` chooses MySQL itself."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.campaign import Fault, Run
from tests.faults.table import faults

pytestmark = pytest.mark.stores
FAULTS = [fault for fault in faults() if "mysql" in fault.counts and fault.short]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault(fault: Fault, tmp_path: Path) -> None:
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    run = Run("mysql", min(fault.short, fault.counts["mysql"]), seed, tmp_path)
    try:
        fault.run(run)
    finally:
        run.close()
    assert not run.violations, f"seed {seed}\n" + "\n".join(run.violations)
    assert run.hits >= run.count, f"seed {seed}: only {run.hits} of {run.count} {fault.unit} were hit"
