"""kill -9 in the middle of payments, with a provider that honours keys and with one that does not.

The provider's ledger is the truth: one charge per key, whatever was killed; or the key says that it does not know.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.demo.conftest import MakeDemo
from tests.demo.process import PATIENCE_SECONDS, Demo

pytestmark = pytest.mark.frameworks

KEYS = 16
KILLS = 2


@pytest.fixture(scope="module")
def careless(make_demo: MakeDemo) -> Demo:
    """The demo with a provider that charges whenever it is asked."""
    return make_demo("--no-provider-honours")


def test_a_provider_without_keys_is_never_asked_twice(careless: Demo) -> None:
    """Killed after the charge: the key is unknown, until the reconciler finds the charge in the ledger. The retry then
    goes on after it, and no phase is skipped; one charge."""
    with pytest.raises(httpx.TransportError):
        careless.pay("crash-0001", 777, simulate="crash")
    answer = careless.retry_until(201, "succeeded", "crash-0001", 777, "crash")
    assert careless.audit("crash-0001") == [("reconciler", "unknown", "failed_retryable")]
    assert [payment["status"] for payment in careless.payments() if payment["amountCents"] == 777] == ["succeeded"]
    status = careless.status("crash-0001")
    assert (status.status_code, status.content) == (201, answer.content)
    assert len(careless.charges(777)) == 1
    assert careless.pay("fine-0001", 778).status_code == 201


def settle(demo: Demo, number: int) -> str:
    """A client that keeps to the rules: what it was told in the end, and that it is told the same again."""
    key, cents = f"kill-{number:04d}", 10_000 + number
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = demo.pay(key, cents)
            again = demo.pay(key, cents)
        except httpx.TransportError:
            continue
        if answer.status_code == 201 and again.status_code == 201:
            assert answer.content == again.content, "two answers for one key"
            return "done"
        assert answer.status_code in (201, 409, 500, 502, 503), answer.text
        time.sleep(0.1)
    raise AssertionError(f"{key} is stuck")


def killed_at_random(demo: Demo) -> Counter[str]:
    """Clients pay; the app is killed among them, each time a moment after another charge was made."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(settle, demo, number) for number in range(KEYS)]
        for _ in range(KILLS):
            size = demo.ledger.stat().st_size
            while demo.ledger.stat().st_size == size and not all(client.done() for client in clients):
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.01))
            demo.kill_one("app")
        told = Counter(client.result() for client in clients)
    print(dict(told))
    return told


def charges_per_key(demo: Demo) -> Counter[int]:
    return Counter(charge["amountCents"] for charge in demo.charges() if charge["amountCents"] >= 10_000)


@pytest.mark.faults
@pytest.mark.timeout(180)
def test_killed_at_random_with_a_provider_that_honours_keys(make_demo: MakeDemo) -> None:
    """Every key ends in 201, with exactly one charge and one payment."""
    demo = make_demo()
    assert killed_at_random(demo) == {"done": KEYS}
    assert charges_per_key(demo) == {10_000 + number: 1 for number in range(KEYS)}
    paid = [(payment["amountCents"], payment["status"]) for payment in demo.payments()]
    assert sorted(paid) == [(10_000 + number, "succeeded") for number in range(KEYS)]


@pytest.mark.faults
@pytest.mark.timeout(180)
def test_killed_at_random_with_one_that_does_not(careless: Demo) -> None:
    """Every key ends in 201 with one charge: what was unknown, the ledger has settled."""
    assert killed_at_random(careless) == {"done": KEYS}
    assert charges_per_key(careless) == {10_000 + number: 1 for number in range(KEYS)}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_children_end_with_the_parent(tmp_path: Path, how: signal.Signals) -> None:
    """However it ends: no process is left behind."""
    with Demo(f"sqlite:///{tmp_path / 'demo.db'}", tmp_path, "--background") as demo:
        children = [demo.process_of(name) for name in ("app", "provider", "worker")]
        demo.process.send_signal(how)
        demo.process.wait(PATIENCE_SECONDS)
        demo.until(lambda: not any(_runs(child) for child in children), "a child outlived its parent")


def test_a_stop_waits_for_the_payment_under_way(tmp_path: Path) -> None:
    """The provider is the last to go: a worker that was told to end can still charge, and does not wait in vain."""
    file = tmp_path / "demo.db"
    with Demo(f"sqlite:///{file}", tmp_path, "--background") as demo, closing(sqlite3.connect(file)) as own:
        demo.pay("slow-0001", 779, simulate="slow")
        job = "SELECT state FROM idempotency_outbox"
        demo.until(lambda: own.execute(job).fetchone() == ("running",), "no worker took the job")
        demo.process.terminate()
        assert demo.process.wait(PATIENCE_SECONDS) == 0
        assert demo.ledger.read_text().count("779") == 1
        assert own.execute(job).fetchone() == ("done",)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        if sys.platform == "linux":
            return False
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        return True
    return state != "Z"


def test_a_child_that_gives_up_ends_the_demo(tmp_path: Path) -> None:
    """A ledger that cannot be written: said, and an exit code, instead of a restart for ever."""
    command = [sys.executable, "-m", "oncekey", "demo", "--port", "0", "--store", f"sqlite:///{tmp_path / 'demo.db'}"]
    command += ["--provider-ledger", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    assert ended.returncode == 1
    assert b"IsADirectoryError" in ended.stderr
