"""A real Celery worker with Redis as its broker, killed with ``kill -9`` again and again: one effect for each order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from celery import Celery

from oncekey.core.states import State
from oncekey.demo.provider import Charge
from oncekey.stores.registry import open_store
from oncekey.testing.servers import RedisServer
from tests.enlist.shop import Shop
from tests.test_examples import provider

# Part of `make faults`: a worker takes seconds to start again, and many on a busy machine.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ORDERS = 16
KILLS, FEWEST_KILLS = 8, 3
"""A fast worker may be done before the last kill."""
WHOLE_KILLS = 2
"""How many of the kills hit the whole worker. Another one takes seconds to start."""
PATIENCE = 300.0


class Worker:
    """A Celery worker with two processes. ``restart`` begins another one."""

    def __init__(self, environ: dict[str, str], told: int, log: Path) -> None:
        self._environ = environ
        self._told = told
        self._log = log.open("ab")
        self.kills = self.whole_kills = 0
        self.restart()

    def restart(self) -> None:
        # A session of its own: its process group has the worker and its children, and nothing else.
        command = [sys.executable, "-m", "celery", "-A", "tests.functions.celery_shop", "worker"]
        self.process = subprocess.Popen(
            [*command, "--concurrency", "2", "--loglevel", "INFO", "--without-gossip", "--without-mingle"],
            cwd=ROOT,
            env=os.environ | self._environ,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[self._told],
            start_new_session=True,
        )

    def kill_all(self) -> None:
        self.kills += 1
        self.whole_kills += 1
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_child(self, pid: int) -> None:
        self.kills += 1
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@pytest.fixture
def told() -> Iterator[tuple[int, int]]:
    """A pipe: the tasks write the ids of their processes."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_killed_celery_worker_has_one_effect_for_each_order(
    url: str, redis_server: RedisServer, told: tuple[int, int], tmp_path: Path
) -> None:
    """Most kills hit one process in the middle of its transaction, and two the whole worker, when the provider has
    charged and not answered yet."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    shop = Shop(url)
    shop.ask("DELETE FROM payments")
    redis_server.flush()
    due, ended = threading.Event(), threading.Event()
    worker: Worker | None = None

    def charged(charge: Charge) -> None:
        if chance.random() < 0.3:
            due.set()  # the charge is in the provider's ledger, and the task does not know it yet

    def watch() -> None:
        """Kill when a task is in the middle of its work."""
        at_once, busy = os.fdopen(os.dup(told[0]), "rb", buffering=0), True
        os.set_blocking(at_once.fileno(), False)
        while busy and not ended.is_set():
            lines = (at_once.read() or b"").split()
            assert worker is not None
            if worker.kills >= KILLS:
                busy = False
            elif lines and chance.random() < 0.5:
                worker.kill_child(int(lines[-1]))
                time.sleep(0.05)  # the next one hits another task
            elif due.is_set() and worker.whole_kills < WHOLE_KILLS:
                due.clear()
                worker.kill_all()
                worker.restart()
            else:
                time.sleep(0.005)
        at_once.close()

    with provider(tmp_path, charged) as (provider_url, ledger):
        environ = {
            "BROKER_URL": redis_server.url,
            "ONCEKEY_STORE": url,
            "PROVIDER_URL": provider_url,
            "LEASE_SECONDS": "2",
            "TOLD": str(told[1]),
        }
        worker = Worker(environ, told[1], tmp_path / "worker.log")
        watcher = threading.Thread(target=watch)
        try:
            watcher.start()
            with Celery(broker=redis_server.url) as sender:
                for number in range(ORDERS):
                    for task in ("examples.celery_charge.charge", "tests.functions.celery_shop.pay"):
                        for _ in range(2):
                            sender.send_task(task, [f"order-{number}", 500])
            wait_for(url, 2 * ORDERS, tmp_path / "worker.log")
        finally:
            ended.set()
            watcher.join(10)
            worker.close()
        charges = Counter(charge["customerId"] for charge in ledger.charges())
    assert charges == {f"order-{number}": 1 for number in range(ORDERS)}
    rows = dict(shop.ask("SELECT key, count(*) FROM payments GROUP BY key"))
    assert rows == {f"order-{number}": 1 for number in range(ORDERS)}
    assert worker.kills >= FEWEST_KILLS, f"only {worker.kills} kills"


def wait_for(url: str, keys: int, log: Path) -> None:
    """Until so many keys have completed, and none is open."""
    with closing(open_store(url)) as store:
        until, states = time.monotonic() + PATIENCE, Counter[State]()
        while time.monotonic() < until:
            states = Counter(record.state for record in store.listing(limit=1000))
            if states == {State.COMPLETED: keys}:
                return
            time.sleep(0.2)
    raise AssertionError(f"{states} after {PATIENCE:g} s; the worker said:\n{log.read_text()[-4000:]}")
