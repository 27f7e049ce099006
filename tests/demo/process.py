"""The real demo in a process of its own, as ``oncekey demo`` starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

START_SECONDS = 40.0


class Demo:
    """``with Demo(store) as demo: demo.pay("key-1", 1200)``."""

    def __init__(self, store: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.store = store
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"demo-{self.port}.log"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        command = [sys.executable, "-m", "oncekey", "demo", "--port", str(self.port), "--store", self.store]
        with self.log.open("ab") as log:
            # A group of its own, so that the parent and the child that serves can be killed as one.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
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

    def kill(self) -> None:
        """As a power cut would: parent and child at once, no farewell."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
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

    def retry_until(self, status: int, problem: str, key: str, cents: int, simulate: str) -> httpx.Response:
        """Retry by the rules: the same key, on lost connections and on 409 with Retry-After."""
        deadline = time.monotonic() + 30
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
