"""What a hostile tenant costs another one: ``python -m benchmarks.hostile``.

One uvicorn with keys in SQLite, and limits as docs/limits.md has them. Ann sends 50 payments a second. In every other
run Eve sends 100 requests a second beside her, which is Eve's limit: new keys, guessed keys at the status endpoint,
bodies that are too large, and odd headers. Five pairs of runs; which of the two comes first changes from pair to pair,
so that what drifts, drifts for both. It prints Ann's p99 in each run, the median of the five ratios, Eve's answers, and
how many rows Eve has in the table. Exit status 1: the median ratio is over 1.5, or Eve has more rows than the cap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from oncekey import OnceKey, Policy
from oncekey.limits import Limits
from oncekey.testing.servers import free_port
from oncekey.web.fastapi import protect
from oncekey.web.status import status_app

ROOT = Path(__file__).resolve().parent.parent
ANNS_PER_SECOND, EVES_PER_SECOND = 50, 100
CAP = 1_200
"""Eve reaches it in her third run. Ann is a new tenant in each."""
CEILING = 1.5
TOO_LARGE = b"x" * (1024 * 1024 + 1)
ODD: list[dict[str, str]] = [{}, {"Idempotency-Key": ""}, {"Idempotency-Key": "a,b"}, {"Idempotency-Key": "k" * 300}]


def create() -> Any:
    """The app, for uvicorn."""
    from fastapi import FastAPI

    app = FastAPI()
    once = OnceKey(
        os.environ["HOSTILE_STORE"],
        scope=lambda request: request.headers["x-tenant"],
        policy=Policy(limit=f"{EVES_PER_SECOND}/second"),
        max_active_keys=CAP,
        limits=Limits(lookups="60/minute"),
    )
    protect(app, once)
    app.mount("/idempotency", status_app(once))

    @app.post("/payments", status_code=201)
    async def pay(body: dict[str, int]) -> dict[str, int]:
        return body

    return app


@contextmanager
def served(folder: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.hostile:create", "--factory", "--port", str(port)]
    environment = os.environ | {"HOSTILE_STORE": f"sqlite:///{folder}/keys.db"}
    process = subprocess.Popen([*command, "--no-access-log", "--log-level", "warning"], cwd=ROOT, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{address}/docs", timeout=1)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(15)


async def paced(ask: Callable[[int], Awaitable[None]], per_second: int, count: int) -> None:
    """Start so many requests a second, whether or not the earlier ones have ended."""
    begun, tasks = time.monotonic(), []
    for number in range(count):
        await asyncio.sleep(max(0.0, begun + number / per_second - time.monotonic()))
        tasks.append(asyncio.ensure_future(ask(number)))
    await asyncio.gather(*tasks)


def client_to(address: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
    return httpx.AsyncClient(base_url=address, limits=limits, timeout=60)


async def ann(address: str, seconds: float, name: str) -> float:
    """Ann's p99 in milliseconds."""
    took: list[float] = []
    async with client_to(address) as client:

        async def pay(_: int) -> None:
            headers = {"X-Tenant": name, "Idempotency-Key": uuid.uuid4().hex}
            begun = time.perf_counter()
            answer = await client.post("/payments", headers=headers, json={"amount": 1})
            took.append(time.perf_counter() - begun)
            if answer.status_code != 201:
                raise RuntimeError(f"Ann got {answer.status_code}: {answer.text}")

        await paced(pay, ANNS_PER_SECOND, ANNS_PER_SECOND)  # connections
        took.clear()
        await paced(pay, ANNS_PER_SECOND, int(seconds * ANNS_PER_SECOND))
    return 1000 * statistics.quantiles(took, n=100)[98]


async def eve(address: str, seconds: float) -> Counter[int]:
    """The statuses of Eve's answers."""
    answers: Counter[int] = Counter()
    async with client_to(address) as client:

        async def attack(number: int) -> None:
            kind, tenant = number % 4, {"X-Tenant": "eve"}
            key = {"Idempotency-Key": uuid.uuid4().hex}
            if kind == 0:
                answer = await client.post("/payments", headers=tenant | key, json={"amount": 1})
            elif kind == 1:
                answer = await client.get(f"/idempotency/{uuid.uuid4().hex}", headers=tenant)
            elif kind == 2:
                answer = await client.post("/payments", headers=tenant | key, content=TOO_LARGE)
            else:
                odd = ODD[number // 4 % len(ODD)]
                answer = await client.post("/payments", headers=tenant | odd, json={"amount": 1})
            answers[answer.status_code] += 1

        await paced(attack, EVES_PER_SECOND, int(seconds * EVES_PER_SECOND))
    return answers


def measured(address: str, seconds: float, name: str, *, hostile: bool) -> tuple[float, Counter[int]]:
    """Ann's p99, with Eve in a process of her own or without, and the statuses of Eve's answers."""
    answers: Counter[int] = Counter()
    if not hostile:
        return asyncio.run(ann(address, seconds, name)), answers
    command = [sys.executable, "-m", "benchmarks.hostile", "--seconds", str(seconds + 1), "--eve", address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        p99 = asyncio.run(ann(address, seconds, name))
        said, _ = process.communicate(timeout=300)
    answers.update({int(status): count for status, count in json.loads(said).items()})
    return p99, answers


def rows_of_eve(folder: str) -> int:
    with closing(sqlite3.connect(f"{folder}/keys.db")) as connection:
        (number,) = connection.execute("SELECT count(*) FROM idempotency_keys WHERE scope = 'eve'").fetchone()
        return int(number)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run (20: 10,500 hostile requests in all)")
    parser.add_argument("--pairs", type=int, default=5, help="of runs, with Eve and without her")
    parser.add_argument("--eve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    seconds: float = options.seconds
    if options.eve:
        print(json.dumps(asyncio.run(eve(options.eve, seconds))))
        return 0
    ratios: list[float] = []
    total: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as folder, served(folder) as address:
        for pair in range(options.pairs):
            found: dict[bool, float] = {}
            for hostile in (False, True) if pair % 2 else (True, False):
                name = f"ann-{pair}-{hostile}"  # a new tenant for each run, so that Ann stays below the cap
                found[hostile], answers = measured(address, seconds, name, hostile=hostile)
                total += answers
            ratios.append(found[True] / found[False])
            print(
                f"pair {pair + 1}: Ann's p99 {found[False]:.1f} ms alone, {found[True]:.1f} ms beside Eve: "
                f"{ratios[-1]:.2f}; Eve has {rows_of_eve(folder)} rows",
                flush=True,
            )
        rows = rows_of_eve(folder)
    print(f"median ratio {statistics.median(ratios):.2f} (at most {CEILING}); Eve's rows {rows} (at most {CAP})")
    print(f"Eve's answers: {', '.join(f'{count} x {status}' for status, count in sorted(total.items()))}")
    return int(statistics.median(ratios) > CEILING or rows > CAP)


if __name__ == "__main__":
    sys.exit(main())
