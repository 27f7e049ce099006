"""Worker processes as an operator runs them: several at once, stopped, paused, killed, and as a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oncekey.core.jobs import JobState
from oncekey.core.states import State
from tests.cli.key_table import runner
from tests.engine.doubles import eventually
from tests.outbox.jobs import Provider
from tests.outbox.outbox_table import OutboxTable, errors

pytestmark = pytest.mark.stores

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def provider(tmp_path: Path) -> Provider:
    return Provider(tmp_path / "provider")


@pytest.fixture
def start(outbox: OutboxTable, provider: Provider) -> Iterator[Start]:
    """Starts ``oncekey worker`` with these options; whatever still runs at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def start(*options: str, **environ: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "oncekey",
            "worker",
            "tests.outbox.jobs:worker",
            "--store",
            outbox.url,
            *options,
        ]
        settings = {"ONCEKEY_TEST_LEDGER": str(provider.folder)} | environ
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun.append(subprocess.Popen(command, env=os.environ | settings, **pipes))  # type: ignore[call-overload]
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    out, error = process.communicate(timeout=50)
    assert process.returncode == code, error
    return out


@pytest.mark.faults
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.faults), 4])
def test_workers_never_run_one_job_at_once(outbox: OutboxTable, provider: Provider, start: Start, workers: int) -> None:
    """Several processes drain 400 jobs: every job once, none beside itself, and no process did them all."""
    outbox.insert([outbox.job("alone", {"seconds": 0.005}) for _ in range(400)])
    processes = [start("--drain", "--json") for _ in range(workers)]
    done = [json.loads(ended(process))["done"] for process in processes]
    assert sum(done) == 400
    assert provider.lines("overlaps") == []
    assert set(Counter(provider.lines("ran")).values()) == {1}
    assert outbox.count(JobState.DONE) == 400


def test_stopped_worker_finishes_its_running_job(outbox: OutboxTable, provider: Provider, start: Start) -> None:
    """SIGTERM: the running job is finished, the next one is left for others; exit code 0."""
    first, second = outbox.add("slow"), outbox.add("slow")
    process = start("--json", "--concurrency", "1", "--grace", "30")
    eventually(lambda: provider.lines("begun"), "it has begun")
    process.send_signal(signal.SIGTERM)
    (provider.folder / "finish").touch()
    assert json.loads(ended(process))["done"] == 1
    assert [outbox.get(job_id).state for job_id in (first, second)] == [JobState.DONE, JobState.READY]


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_worker_that_may_not_wait_releases_its_jobs(
    outbox: OutboxTable, provider: Provider, start: Start, signals: list[signal.Signals]
) -> None:
    """After the grace, or on a second signal: cancelled, ready at once for others, and the attempt does not count."""
    job_id = outbox.add("slow")
    process = start("--json", "--grace", "0.2" if len(signals) == 1 else "600")
    eventually(lambda: provider.lines("begun"), "it has begun")
    process.send_signal(signals[0])
    if signals[1:]:
        eventually(lambda: _heard(process, signals[0]), "the first signal is delivered")
        process.send_signal(signals[1])
    assert json.loads(ended(process))["released"] == 1
    job = outbox.get(job_id)
    assert (job.state, job.attempt, len(errors(job))) == (JobState.READY, 0, 1)
    assert len(provider.lines("cancelled")) == 1


def _heard(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether a signal was delivered: one that is pending and the next of its kind become one."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():  # not Linux
        time.sleep(1.0)
        return True
    pending = [line.split()[1] for line in status.read_text().splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in pending)


def test_a_thread_that_hangs_does_not_keep_a_worker_alive(
    outbox: OutboxTable, provider: Provider, start: Start
) -> None:
    """The process ends; its job keeps the lease, and is done by another when that is over."""
    job_id = outbox.add("slow_in_thread")
    process = start("--grace", "0.1", ONCEKEY_TEST_LEASE="1")
    eventually(lambda: provider.lines("begun"), "it has begun")
    process.send_signal(signal.SIGTERM)
    ended(process)
    assert outbox.get(job_id).state is JobState.RUNNING
    (provider.folder / "finish").touch()
    start()
    eventually(lambda: outbox.get(job_id).state is JobState.DONE, "another worker did it")
    assert outbox.get(job_id).attempt == 2


def test_a_killed_workers_job_is_done_by_another(outbox: OutboxTable, provider: Provider, start: Start) -> None:
    """kill -9 in the middle: after the lease a second worker does it, as attempt 2, with the first in the history."""
    job_id = outbox.add("slow")
    first = start(ONCEKEY_TEST_LEASE="1")
    eventually(lambda: provider.lines("begun"), "it has begun")
    first.kill()
    first.wait()
    (provider.folder / "finish").touch()
    start()  # with a long lease: on a busy machine it would lose a short one
    eventually(lambda: outbox.get(job_id).state is JobState.DONE, "another worker did it")
    job = outbox.get(job_id)
    assert (job.attempt, errors(job)) == (2, ["the worker's lease ran out"])


def test_a_paused_worker_comes_back_to_nothing(outbox: OutboxTable, provider: Provider, start: Start) -> None:
    """SIGSTOP past the lease; a second worker does the job; SIGCONT: the first is cancelled, and writes nothing."""
    (key,) = outbox.pending()
    job_id = outbox.add("slow", of=key)
    first = start("--json", ONCEKEY_TEST_LEASE="1")
    eventually(lambda: provider.lines("begun"), "it has begun")
    outbox.pause(first.pid)
    second = start("--json")  # with a long lease, which it does not lose
    eventually(lambda: len(provider.lines("begun")) == 2, "the second has begun it")
    before = outbox.get(job_id)
    assert before.attempt == 2
    first.send_signal(signal.SIGCONT)
    eventually(lambda: provider.lines("cancelled"), "the first has noticed")
    assert provider.lines("cancelled") == [f"{job_id} {first.pid}"]
    first.send_signal(signal.SIGTERM)
    assert json.loads(ended(first))["lost"] == 1
    assert (outbox.get(job_id).owner, outbox.get(job_id).state) == (before.owner, JobState.RUNNING)
    assert outbox.key(key).state is State.PENDING
    (provider.folder / "finish").touch()
    eventually(lambda: outbox.get(job_id).state is JobState.DEAD, "the second has ended it")  # it returns no response
    second.send_signal(signal.SIGTERM)
    ended(second)
    assert outbox.key(key).state is State.UNKNOWN


@pytest.mark.faults
def test_a_job_that_kills_its_workers_ends_in_the_dead_letters(
    outbox: OutboxTable, provider: Provider, start: Start
) -> None:
    """After its attempts it is not run again: a poison that cannot be caught stops killing."""
    job_id = outbox.add("deadly")
    for _ in range(2):
        process = start(ONCEKEY_TEST_LEASE="0.5")
        process.communicate(timeout=50)
        assert process.returncode == -signal.SIGKILL
    start(ONCEKEY_TEST_LEASE="0.5")
    eventually(lambda: outbox.get(job_id).state is JobState.DEAD, "it is a dead letter")
    job = outbox.get(job_id)
    assert len(provider.lines("begun")) == 2
    assert errors(job)[:2] == ["the worker's lease ran out"] * 2
    assert "used up" in errors(job)[2]


# the command


def test_the_command_drains_and_counts(outbox: OutboxTable, provider: Provider, start: Start) -> None:
    """Poison among good ones: the exit code is 0, and the counts say what became of them."""
    keys = outbox.pending(3)
    jobs = [outbox.job("charge", {"flaky": number == 0}, of=key) for number, key in enumerate(keys)]
    jobs += [outbox.job("charge_in_thread") for _ in range(5)] + [outbox.job("poison"), outbox.job("hopeless")]
    outbox.insert(jobs)
    said = json.loads(ended(start("--drain", "--json")))
    assert said["dead"] == 2
    assert said["done"] in (7, 8)  # the flaky one may be due a moment later
    for key in keys[1:]:
        assert outbox.key(key).state is State.COMPLETED
    assert len(provider.charges()) == 8
    shown = ended(start("--drain"))
    assert "dead" in shown
    assert "/s, lag" in shown


def test_one_batch_as_a_command(outbox: OutboxTable, start: Start) -> None:
    outbox.insert([outbox.job("charge") for _ in range(10)])
    assert json.loads(ended(start("--once", "--json", "--concurrency", "4")))["done"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "not of the form module:name"),
        (["no.such.module:worker"], "there is no module 'no'"),
        (["tests.outbox.jobs:nothing"], "has no 'nothing'"),
        (["tests.outbox.jobs:provider"], "is of type Provider, not Worker"),
        (["tests.outbox.jobs:worker", "--once", "--drain"], "give one of them"),
        (["tests.outbox.jobs:worker"], "the worker has no store"),
        (["tests.outbox.jobs:worker", "--store", "memory://"], "has no outbox"),
    ],
)
def test_mistakes_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, error = runner("", monkeypatch, capsys)("worker", *arguments)
    assert (code, out) == (1, "")
    assert error.startswith("oncekey: ")
    assert words in error
    assert error.count("\n") == 1
