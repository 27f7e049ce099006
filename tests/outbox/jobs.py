"""Tasks for real worker processes, and a provider that keeps its ledger on disk and honours keys.

Told by the environment: ONCEKEY_TEST_LEDGER is the provider's folder. One file per charge, made in one step (a hard
link), so that kill -9 at any moment leaves a whole charge or none; and a line per call, however often it is repeated.
"""

from __future__ import annotations

import asyncio
import os
import time
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from oncekey.outbox import Context, Dead, Response, Worker

_numbers = count(1)


class Provider:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("charges", "drafts", "running"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def charge(self, downstream_key: str) -> str:
        """Charge once for each key, and answer every call with the id of that charge."""
        self.line("calls", downstream_key)
        draft = self.folder / "drafts" / f"{os.getpid()}-{next(_numbers)}"
        draft.write_text(f"ch_{draft.name}")
        charge = self.folder / "charges" / downstream_key
        try:
            os.link(draft, charge)
        except FileExistsError:
            return charge.read_text()
        finally:
            draft.unlink()
        return charge.read_text()

    def line(self, name: str, text: str) -> None:
        """One line, appended in one write."""
        file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{text}\n".encode())
        finally:
            os.close(file)

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def count(self) -> int:
        return sum(1 for _ in (self.folder / "charges").iterdir())

    def charges(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "charges").iterdir()}


provider = Provider(Path(os.environ.get("ONCEKEY_TEST_LEDGER") or mkdtemp(prefix="oncekey-ledger-")))
worker = Worker(
    concurrency=int(os.environ.get("ONCEKEY_TEST_CONCURRENCY", "8")),
    lease=float(os.environ.get("ONCEKEY_TEST_LEASE", "30")),
    poll=0.05,
)


@worker.task(max_attempts=1_000, backoff=0.01, max_backoff=0.05)
async def charge(ctx: Context, payload: Any) -> Response:
    await asyncio.sleep(0)
    charge_id = provider.charge(ctx.downstream_key)
    await ctx.record(charge_id)
    if payload.get("flaky") and ctx.attempt == 1:
        raise ConnectionError("the answer was lost on its way")
    return Response(201, {"charge": charge_id})


@worker.task(max_attempts=1_000, backoff=0.01, max_backoff=0.05)
def charge_in_thread(ctx: Context, payload: Any) -> Response:
    charge_id = provider.charge(ctx.downstream_key)
    ctx.record(charge_id)
    return Response(201, {"charge": charge_id})


@worker.task(max_attempts=3, backoff=0.0)
async def poison(ctx: Context, payload: Any) -> None:
    raise ValueError(f"cannot be digested, try {ctx.attempt}")


@worker.task(max_attempts=3)
async def hopeless(ctx: Context, payload: Any) -> None:
    raise Dead("the account is closed")


@worker.task()
async def alone(ctx: Context, payload: Any) -> None:
    """Says so if the same job runs twice at the same time."""
    mark = provider.folder / "running" / ctx.job_id
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        provider.line("overlaps", ctx.job_id)
        return
    await asyncio.sleep(payload.get("seconds", 0.001))
    mark.unlink()
    provider.line("ran", ctx.job_id)


@worker.task(max_attempts=5)
async def slow(ctx: Context, payload: Any) -> None:
    """Begins, says so, and ends when a file appears (or is cancelled, and says so too)."""
    provider.line("begun", f"{ctx.job_id} {ctx.attempt} {os.getpid()}")
    try:
        while not (provider.folder / "finish").exists():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        provider.line("cancelled", f"{ctx.job_id} {os.getpid()}")
        raise
    provider.line("finished", f"{ctx.job_id} {os.getpid()}")


@worker.task(max_attempts=5, timeout=600)
def slow_in_thread(ctx: Context, payload: Any) -> None:
    provider.line("begun", f"{ctx.job_id} {ctx.attempt} {os.getpid()}")
    while not (provider.folder / "finish").exists():
        time.sleep(0.01)
    provider.line("finished", f"{ctx.job_id} {os.getpid()}")


@worker.task(max_attempts=2)
async def deadly(ctx: Context, payload: Any) -> None:
    """Takes its process down, every time."""
    provider.line("begun", f"{ctx.job_id} {ctx.attempt} {os.getpid()}")
    os.kill(os.getpid(), 9)
