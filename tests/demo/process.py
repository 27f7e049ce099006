"""The real demo in a process of its own, as ``oncekey demo`` starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from oncekey.stores.registry import open_store

START_SECONDS = 40.0
PATIENCE_SECONDS = 45.0

_T = TypeVar("_T")


class Demo:
    """``with Demo(store, folder, "--background") as demo: demo.pay("key-1", 1200)``."""

    def __init__(self, store: str, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.store = store
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"demo-{self.port}.log"
        self.ledger = folder / f"charges-{self.port}.jsonl"
        self.options = ["--provider-ledger", str(self.ledger), *options]
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        command = [sys.executable, "-m", "oncekey", "demo", "--port", str(self.port), "--store", self.store]
        command += self.options
        with self.log.open("ab") as log:
            # A group of its own, so that the parent and its children can be killed as one.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"ONCEKEY_DEMO_PACE": "0.5"}
            )
        self.wait_until_up()

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.http.get("/openapi.json")
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"the demo did not start: {self.log.read_text()}")

    def process_of(self, name: str) -> int:
        """The app, the provider or the worker, as it was last started."""
        started: list[str] = re.findall(rf"^the {name} is process (\d+)$", self.log.read_text(), re.MULTILINE)
        return int(started[-1])

    def kill_one(self, name: str) -> None:
        """kill -9 of one child, and wait for the parent to have started another."""
        before = self.process_of(name)
        os.kill(before, signal.SIGKILL)
        self.until(lambda: self.process_of(name) != before, f"the {name} was not started again")

    def until(self, holds: Callable[[], _T], what: str, seconds: float = PATIENCE_SECONDS) -> _T:
        """Poll until it holds, and return what it said."""
        deadline = time.monotonic() + seconds
        while not (said := holds()):
            assert time.monotonic() < deadline, f"{what}: {self.log.read_text()[-2000:]}"
            time.sleep(0.05)
        return said

    def kill(self) -> None:
        """As a power cut would: parent and children at once, no farewell."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with suppress(ProcessLookupError):  # nothing is left behind, whatever the demo did wrong
            self.kill()

    # -- as a client ---------------------------------------------------------------------------------------------

    def pay(
        self, key: str | None, cents: int = 1200, *, tenant: str = "tenant-a", simulate: str | None = None, **more: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {tenant}"} | ({"Idempotency-Key": key} if key else {})
        body = {"customerId": "cus-1", "amountCents": cents, "currency": "EUR"} | more
        return self.http.post(
            "/payments", params={"simulate": simulate} if simulate else {}, headers=headers, json=body
        )

    def payments(self, tenant: str = "tenant-a") -> list[dict[str, Any]]:
        answer = self.http.get("/payments", headers={"Authorization": f"Bearer {tenant}"})
        assert answer.status_code == 200
        listed: list[dict[str, Any]] = answer.json()
        return listed

    def charges(self, cents: int | None = None) -> list[dict[str, Any]]:
        """The provider's ledger; of one amount, which a test has for itself."""
        answer = self.http.get("/provider/charges")
        assert answer.status_code == 200
        return [charge for charge in answer.json() if cents is None or charge["amountCents"] == cents]

    def audit(self, key: str, tenant: str = "tenant-a") -> list[tuple[str, str | None, str | None]]:
        """Who moved this key beside its owners, from where, and to where."""
        with closing(open_store(self.store)) as store:
            lines = store.audit(tenant, key, 10)
            store.disconnect()
        return [(line.who, line.before, line.after) for line in lines]

    def status(self, key: str, tenant: str = "tenant-a") -> httpx.Response:
        return self.http.get(f"/idempotency/{key}", headers={"Authorization": f"Bearer {tenant}"})

    def retry_until(
        self, status: int, problem: str, key: str, cents: int, simulate: str | None = None
    ) -> httpx.Response:
        """Retry by the rules: the same key, on lost connections and on 202 and 409 with Retry-After."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        answer = None
        while time.monotonic() < deadline:
            try:
                answer = self.pay(key, cents, simulate=simulate)
            except httpx.TransportError:
                continue
            if answer.status_code == status and problem in answer.text:
                return answer
            time.sleep(0.2)
        raise AssertionError(f"never {status} {problem}: {answer and (answer.status_code, answer.text)}")
