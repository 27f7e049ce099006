"""A real Celery worker with Redis as its broker, killed with ``kill -9`` again and again: one effect for each order."""

from __future__ import annotations

import os
import queue
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

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]  # a worker takes long to start on a busy machine

ROOT = Path(__file__).parents[2]
ORDERS = 16
CHILD_KILLS = 6
"""How many kills hit one process, each in the transaction of another order."""
WHOLE_KILLS = 2
"""How many kills hit the whole worker. Another one takes seconds to start."""
VISIBLE_AGAIN = 2.5
"""More than the visibility timeout of ``celery_shop``. A worker takes what a dead one had when it starts, and then only
every 100 seconds."""
PATIENCE = 300.0


class Worker:
    """A Celery worker with two processes. ``restart`` begins another one."""

    def __init__(self, environ: dict[str, str], told: int, log: Path) -> None:
        self._environ = environ
        self._told = told
        self._log = log.open("ab")
        self.child_kills = self.whole_kills = 0
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
        self.whole_kills += 1
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_child(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)  # it waits for that
        self.child_kills += 1

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
    charged and not answered yet. Task and provider wait for the kill, so that no worker is too fast for it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    orders = [f"order-{number}" for number in range(ORDERS)]
    chosen = random.Random(seed).sample(orders, CHILD_KILLS + WHOLE_KILLS)
    struck, charges_cut = chosen[:CHILD_KILLS], set(chosen[CHILD_KILLS:])
    killed = tmp_path / "killed"
    killed.mkdir()
    shop = Shop(url)
    shop.ask("DELETE FROM payments")
    redis_server.flush()
    due: queue.Queue[threading.Event] = queue.Queue()
    ended = threading.Event()
    worker: Worker | None = None

    def charged(charge: Charge) -> None:
        """The charge is in the provider's ledger, and the task does not know it yet."""
        if charge["customerId"] in charges_cut:
            charges_cut.discard(charge["customerId"])
            due.put(gone := threading.Event())
            gone.wait(PATIENCE)

    def watch() -> None:
        """Kill the process that waits for it, and the worker when a charge is due."""
        assert worker is not None
        told_lines = os.fdopen(os.dup(told[0]), "rb", buffering=0)
        os.set_blocking(told_lines.fileno(), False)
        while not ended.is_set():
            with suppress(queue.Empty):
                gone = due.get_nowait()
                worker.kill_all()
                gone.set()
                told_lines.read()  # of processes that are dead
                time.sleep(VISIBLE_AGAIN)
                worker.restart()
            for line in (told_lines.read() or b"").splitlines():
                pid, order = line.decode().split()
                worker.kill_child(int(pid))
                (killed / order).touch()
            time.sleep(0.005)
        told_lines.close()

    with provider(tmp_path, charged) as (provider_url, ledger):
        environ = {
            "BROKER_URL": redis_server.url,
            "ONCEKEY_STORE": url,
            "PROVIDER_URL": provider_url,
            "LEASE_SECONDS": "2",
            "TOLD": str(told[1]),
            "STRUCK": ",".join(struck),
            "KILLED": str(killed),
        }
        worker = Worker(environ, told[1], tmp_path / "worker.log")
        watcher = threading.Thread(target=watch)
        try:
            watcher.start()
            with Celery(broker=redis_server.url) as sender:
                for order in orders:
                    for task in ("examples.celery_charge.charge", "tests.functions.celery_shop.pay"):
                        for _ in range(2):
                            sender.send_task(task, [order, 500])
            wait_for(url, 2 * ORDERS, tmp_path / "worker.log")
        finally:
            ended.set()
            watcher.join(10)
            worker.close()
        charges = Counter(charge["customerId"] for charge in ledger.charges())
    assert charges == dict.fromkeys(orders, 1)
    rows = dict(shop.ask("SELECT key, count(*) FROM payments GROUP BY key"))
    assert rows == dict.fromkeys(orders, 1)
    assert (worker.child_kills, worker.whole_kills) == (CHILD_KILLS, WHOLE_KILLS)


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
