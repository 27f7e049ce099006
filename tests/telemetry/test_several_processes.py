"""gunicorn with two workers: the page of any worker shows the sum of all, also after one was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from oncekey.testing.http.stack import until
from oncekey.testing.servers import HOST, free_port
from tests.telemetry.pages import number, series

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
CREATED = "api_idempotency_reserve_created_total"
REPLAYED = "api_idempotency_reserve_replay_total"
RUNNING = "api_idempotency_handler_running"


class Served:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metrics = folder / "metrics"
        metrics.mkdir()
        port = free_port()
        self.log = (folder / "server.log").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--pythonpath", str(ROOT), "--preload", "--workers", "2"),
                *("--threads", "4", "--bind", f"{HOST}:{port}", "tests.telemetry.served:make()"),
            ],
            env=os.environ
            | {
                "PROMETHEUS_MULTIPROC_DIR": str(metrics),
                "ONCEKEY_TEST_FOLDER": str(folder),
                "ONCEKEY_TEST_STORE": f"sqlite:///{folder / 'keys.db'}",
            },
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.http = httpx.Client(
            base_url=f"http://{HOST}:{port}", headers={"Connection": "close"}, timeout=30.0, trust_env=False
        )
        until(self._answers, "gunicorn starts", 30.0)

    def _answers(self) -> bool:
        try:
            return self.http.get("/pid").status_code == 200
        except httpx.TransportError:
            return False

    def pay(self, key: str, tenant: str = "acme") -> int:
        headers = {"Idempotency-Key": key, "X-Tenant": tenant}
        return self.http.post("/pay", json={}, headers=headers).status_code

    def page(self) -> str:
        return self.http.get("/metrics").text

    def pids(self) -> set[str]:
        return {self.http.get("/pid").text for _ in range(40)}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
    yield server
    server.process.terminate()
    server.process.wait(20)
    server.http.close()
    server.log.close()


def test_page_of_any_process_shows_the_sum_of_all(served: Served) -> None:
    until(lambda: len(served.pids()) == 2, "both workers answer")
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda n: served.pay(f"some-key-{n % 30}-of-many"), range(90))) <= {201, 409}
    for n in range(30):
        served.pay(f"some-key-{n}-of-many")
    pages = [served.page() for _ in range(12)]
    assert {number(page, CREATED) for page in pages} == {31.0}, "30, and one before the fork"
    found = number(pages[0], "api_idempotency_reserve_in_progress_total")
    assert {number(page, REPLAYED) for page in pages} == {90.0 - found}
    assert {number(page, "api_idempotency_handler_duration_seconds_count") for page in pages} == {31.0}
    assert {number(page, "api_idempotency_begin_duration_seconds_count") for page in pages} == {121.0}


def test_gauges_of_a_killed_process_end_and_its_counters_stay(served: Served) -> None:
    (served.folder / "gate").touch()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(served.pay, "key-of-the-killed")
        until(lambda: list(served.folder.glob("entered-*")), "the handler runs")
        assert number(served.page(), RUNNING) == 1.0
        [entered] = served.folder.glob("entered-*")
        os.kill(int(entered.name.removeprefix("entered-")), signal.SIGKILL)
        assert answer.exception(30) is not None
    until(lambda: number(served.page(), RUNNING) == 0.0, "the handler of the killed process counts no more")
    assert number(served.page(), CREATED) == 2.0


def test_tenants_are_bounded_in_every_process(served: Served) -> None:
    for n in range(40):
        assert served.pay(f"key-of-tenant-{n}-here", tenant=f"tenant-{n}") == 201
    shown = {labels["tenant"] for labels in series(served.page(), CREATED)}
    assert "other" in shown
    assert len(shown - {"other"}) <= 1 + 2, "two tenants; acme was the parent's, and each worker has one place left"
    assert number(served.page(), CREATED) == 41.0
