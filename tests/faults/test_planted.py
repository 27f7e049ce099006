"""The faults find what they are there to find: a wrong promise in the app, tampered ledgers, and a broken campaign."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from oncekey.core.jobs import JobState
from tests.faults import one_fault, outbox, pauses, points, report
from tests.faults.app import KINDS
from tests.faults.campaign import Fault, Run
from tests.faults.fork_server import ForkServer
from tests.outbox.outbox_table import OutboxTable


def test_an_app_that_promises_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that its charge may be repeated, and the provider honours no keys: killed after the charge, it charges
    twice."""
    monkeypatch.setitem(KINDS, "external", replace(KINDS["external"], effects="repeatable"))
    monkeypatch.setattr(points, "CASES", (points.Case("external", "request.finish", "before"),))
    monkeypatch.setattr(points, "LEASE", 0.3)
    run = Run("sqlite", 1, 1, tmp_path)
    points.kill_at_every_point(run)
    (found,) = run.violations
    assert found.startswith("I1: 'charge' happened 2 times")


def test_key_unknown_or_final_against_expectation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other way round, of one key each."""
    cases = (points.Case("once", "effect.call", "after"), points.Case("once", "phase.commit", "after"))
    monkeypatch.setattr(points, "CASES", cases)
    monkeypatch.setattr(points, "IN_DOUBT", {("phase.commit", "after")})
    monkeypatch.setattr(points, "LEASE", 0.3)
    run = Run("sqlite", 2, 1, tmp_path)
    points.kill_at_every_point(run)
    told = sorted(each.partition("\n")[0].rpartition(":")[2] for each in run.violations)
    assert told == [" final, and it should be unknown", " unknown, and it should be final"]


@pytest.mark.faults
def test_pause_with_a_false_expectation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that does not hold its row after all, and one whose call was not taken for doubtful."""
    cases = (pauses.Case("phased", "phase", "before", holds=True), pauses.Case("once", "effect.call", "after"))
    monkeypatch.setattr(pauses, "FREE", cases)
    monkeypatch.setattr(pauses, "IN_DOUBT", set())
    run = Run("sqlite", 2, 1, tmp_path)
    pauses.pause_at_a_point(run)
    told = sorted(each.partition("\n")[0] for each in run.violations)
    assert len(told) == 2
    assert told[0].startswith("I3: its row was held")
    assert told[1].endswith("unknown, and it should be final")


def test_a_process_that_does_not_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no violation: the campaign is broken."""
    monkeypatch.setattr(points, "CASES", (points.Case("external", "effect.call", "before"),))
    with pytest.raises(AssertionError, match="survived"):
        points.kill_at_every_point(Run("sqlite", 1, 1, tmp_path))


@pytest.fixture
def campaign(tmp_path: Path) -> outbox._Campaign:
    run = Run("sqlite", 40, 1, tmp_path)
    with ForkServer(roles={"worker": outbox.work}, log=tmp_path / "workers.log") as forks:
        made = outbox._Campaign(run, OutboxTable(run.url()), forks)
        made.work()
    return made


def test_an_outbox_that_was_tampered_with(campaign: outbox._Campaign) -> None:
    table, run, folder = campaign.outbox, campaign.run, campaign.provider.folder / "charges"
    campaign.check()
    assert run.violations == []
    plain = [job for job in campaign.jobs if job.id not in campaign.poison and job.downstream_key not in campaign.keys]
    (folder / plain[0].downstream_key).unlink()
    (folder / "one-more").write_text("ch_more")
    (folder / plain[1].downstream_key).write_text((folder / plain[2].downstream_key).read_text())
    table.execute(f"UPDATE idempotency_outbox SET state = '{JobState.READY}' WHERE id = '{plain[3].id}'")
    poison = sorted(campaign.poison)
    table.execute(f"UPDATE idempotency_outbox SET state = '{JobState.DONE}' WHERE id = '{poison[0]}'")
    table.execute(f"UPDATE idempotency_outbox SET history = '[]' WHERE id = '{poison[1]}'")
    first, second = (key.key for key in list(campaign.keys.values())[:2])
    table.execute(f"UPDATE idempotency_keys SET state = 'pending' WHERE key = '{first}'")
    table.execute(f"UPDATE idempotency_keys SET response_status = 201, response_body = x'00' WHERE key = '{second}'")
    campaign.check()
    table.close()
    told = sorted(each.partition("\n")[0] for each in run.violations)
    for says in (
        "I8: not delivered: None by", "I8: not delivered: ch_", "I1: charges that no job asked for: {'one-more'}",
        "I1: two charges share an id", "I1: done, and another charge is recorded", "I8: poison, and no dead letter",
        "I8: a dead letter without its history", "I4: a deferred key is pending", "and its answer another",
    ):  # fmt: skip
        assert sum(says in each for each in told) == 1, (says, told)


# -- the runner --------------------------------------------------------------------------------------------------------


def _told(run: Callable[[Run], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, one_fault.Job]:
    """As its own process would tell, and as its parent hears it: in whatever pieces the pipe gives."""
    fault = Fault("a fault", run, {"sqlite": 2}, 1, ("I1",))
    monkeypatch.setattr(one_fault, "faults", lambda: (fault,))
    ours, theirs = os.pipe()
    options = argparse.Namespace(one=fault.name, store="sqlite", count=2, seed=7, folder=folder, server="", tell=theirs)
    code = one_fault.run_one(options)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    pieces = iter([told[:10], told[10:20], told[20:]])
    states = iter([None, None, code])
    job = one_fault.Job(fault, "sqlite", 2, 7)
    job._folder = folder
    (folder / "output").touch()
    job._pipe = SimpleNamespace(read=lambda: next(pieces), close=lambda: None)  # type: ignore[assignment]
    job._process = SimpleNamespace(poll=lambda: next(states), returncode=code)  # type: ignore[assignment]
    job._began = time.monotonic()
    while job.going_on():
        pass
    return code, job


def _well(run: Run) -> None:
    run.asked(3)
    run.hit(2)


def _badly(run: Run) -> None:
    run.hit(2)
    run.violated("I1", "two charges")


def _not_at_all(run: Run) -> None:
    raise RuntimeError("it never came to its point")


def test_progress_of_a_fault_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, job = _told(_well, tmp_path, monkeypatch)
    assert (code, job.hits, job.requests, job.failed) == (0, 2, 3, False)


def test_violation_of_a_fault_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, job = _told(_badly, tmp_path, monkeypatch)
    assert (code, job.failed, job.violations, job.broken) == (0, True, ["I1: two charges"], None)


def test_broken_fault_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, job = _told(_not_at_all, tmp_path, monkeypatch)
    assert (code, job.failed) == (1, True)
    assert "it never came to its point" in (job.broken or "")


def test_too_few_keys_are_a_broken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job = _told(lambda run: run.hit(), tmp_path, monkeypatch)
    assert job.broken == "only 1 of 2 keys were hit"


def test_the_table_goes_between_the_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.MARKERS[0]}\nold\n{report.MARKERS[1]}\nafter\n")
    job = one_fault.Job(Fault("a fault", _well, {"sqlite": 2}, 1, ("I1", "I4")), "sqlite", 2, 7)
    job.hits, job.requests = 2, 1_234
    report.write_table(str(page), [job], 7)
    text = page.read_text()
    assert text.startswith(f"before\n{report.MARKERS[0]}\nRun on ")
    assert text.endswith(f"\n{report.MARKERS[1]}\nafter\n")
    assert "| a fault | sqlite | 2 keys | 1,234 | 0 | 0 | 7 | I1 I4 |" in text
    assert "old" not in text
    assert "/" not in text.partition("Run on ")[2].partition("\n")[0]  # no path of this machine
    report.write_table(str(page), [job], 7)
    assert page.read_text() == text
