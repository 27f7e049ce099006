"""Two that do not agree are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from oncekey.core.jobs import Job
from tests.faults import agreeing, one_fault
from tests.faults.campaign import Run
from tests.stores.outbox_model import OutboxModel

claim = OutboxModel.claim


def forgets_to_count(self: OutboxModel, *asked: Any) -> list[Job]:
    return [self._put(replace(job, attempt=job.attempt - 1)) for job in claim(self, *asked)]


def test_difference_between_stores_is_reported(tmp_path: Path) -> None:
    run = Run("sqlite", 60, 1, tmp_path)
    with patch.object(OutboxModel, "claim", forgets_to_count), patch.object(agreeing, "SHORTENED", ()):
        agreeing.agree(run)
    assert run.violations
    assert run.violations[0].startswith("I3")


def test_row_of_a_store_without_an_outbox_does_not_claim_i8() -> None:
    (fault,) = agreeing.FAULTS
    assert "I8" in one_fault.Job(fault, "mysql", 1, 1).promises
    assert "I8" not in one_fault.Job(fault, "redis", 1, 1).promises + one_fault.Job(fault, "dynamodb", 1, 1).promises
