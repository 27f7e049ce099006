"""What a hostile tenant costs another one: ``python -m benchmarks.hostile``.

One uvicorn with keys in SQLite, and limits as docs/limits.md has them. Ann sends 50 payments a second. In every other
run Eve sends 120 requests a second beside her: more new keys than her rate allows, guessed keys at the status endpoint,
bodies that are too large, and odd headers. Five pairs of runs; which of the two comes first changes from pair to pair,
so that what drifts, drifts for both. It prints the limits, Ann's p99 and the CPU time of the server in each run, Eve's
requests and answers, the median of the five ratios, how many rows Eve has in the table, and the load of the machine.
Exit status 1: the median ratio is over 1.5, Eve has more rows than the cap, or no new key was refused, so that nothing
was measured.
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
from typing import Any, NamedTuple

import httpx

from oncekey import OnceKey, Policy
from oncekey.limits import Limits
from oncekey.testing.servers import free_port
from oncekey.web.fastapi import protect
from oncekey.web.status import status_app

ROOT = Path(__file__).resolve().parent.parent
ANNS_PER_SECOND, EVES_PER_SECOND = 50, 120
RATE = 80
"""New keys of a tenant in a second. Ann stays below it, also if she stalls for half a second; Eve does not."""
CAP = 4_000
"""Eve reaches it in her third run. Ann is a new tenant in each."""
LOOKUPS = 60
"""Of a minute."""
KINDS = ("new",) * 9 + ("guess", "large", "odd")
"""Eve's requests, in turn: 90 new keys a second."""
CEILING = 1.5
QUIET = ("--no-access-log", "--log-level", "warning", "--timeout-keep-alive", "60")
TOO_LARGE = b"x" * (1024 * 1024 + 1)
ODD: list[dict[str, str]] = [{}, {"Idempotency-Key": ""}, {"Idempotency-Key": "a,b"}, {"Idempotency-Key": "k" * 300}]


def create() -> Any:
    """The app, for uvicorn."""
    from fastapi import FastAPI

    app = FastAPI()
    once = OnceKey(
        os.environ["HOSTILE_STORE"],
        scope=lambda request: request.headers["x-tenant"],
        policy=Policy(limit=f"{RATE}/second"),
        max_active_keys=CAP,
        limits=Limits(lookups=f"{LOOKUPS}/minute"),
    )
    protect(app, once)
    app.mount("/idempotency", status_app(once))

    @app.post("/payments", status_code=201)
    async def pay(body: dict[str, int]) -> dict[str, int]:
        return body

    return app


class Server(NamedTuple):
    address: str
    process: int

    def cpu_seconds(self) -> float:
        """What the server has computed so far. Unlike a p99, it hardly depends on what else the machine does."""
        times = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(folder: str) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.hostile:create", "--factory", "--port", str(port)]
    environment = os.environ | {"HOSTILE_STORE": f"sqlite:///{folder}/keys.db"}
    process = subprocess.Popen([*command, *QUIET], cwd=ROOT, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{address}/docs", timeout=1)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield Server(address, process.pid)
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
    refused = 0
    async with client_to(address) as client:

        async def pay(_: int) -> None:
            headers = {"X-Tenant": name, "Idempotency-Key": uuid.uuid4().hex}
            begun = time.perf_counter()
            answer = await client.post("/payments", headers=headers, json={"amount": 1})
            if answer.status_code == 429:  # this process stood still, and then sent too many at once
                nonlocal refused
                refused += 1
                return
            took.append(time.perf_counter() - begun)
            if answer.status_code != 201:
                raise RuntimeError(f"Ann got {answer.status_code}: {answer.text}")

        await paced(pay, ANNS_PER_SECOND, ANNS_PER_SECOND)  # connections
        took.clear()
        await paced(pay, ANNS_PER_SECOND, int(seconds * ANNS_PER_SECOND))
    if refused:
        print(f"{refused} of Ann's requests came too close together, and were refused", flush=True)
    return 1000 * statistics.quantiles(took, n=100)[98]


async def eve(address: str, seconds: float) -> Counter[str]:
    """How many of Eve's requests of each kind got which status: ``new 429``."""
    answers: Counter[str] = Counter()
    async with client_to(address) as client:

        async def attack(number: int) -> None:
            kind, tenant = KINDS[number % len(KINDS)], {"X-Tenant": "eve"}
            key = {"Idempotency-Key": uuid.uuid4().hex}
            if kind == "new":
                asked = client.post("/payments", headers=tenant | key, json={"amount": 1})
            elif kind == "guess":
                asked = client.get(f"/idempotency/{uuid.uuid4().hex}", headers=tenant)
            elif kind == "large":
                asked = client.post("/payments", headers=tenant | key, content=TOO_LARGE)
            else:
                odd = ODD[number // len(KINDS) % len(ODD)]
                asked = client.post("/payments", headers=tenant | odd, json={"amount": 1})
            try:
                answers[f"{kind} {(await asked).status_code}"] += 1
            except httpx.TransportError:  # the server closes the connection of a body that it does not read
                answers[f"{kind} lost"] += 1

        print("Eve begins", flush=True)
        await paced(attack, EVES_PER_SECOND, int(seconds * EVES_PER_SECOND))
    return answers


class Run(NamedTuple):
    p99: float
    """Of Ann, in milliseconds."""
    cpu: float
    """Seconds that the server computed."""
    answers: Counter[str]
    """Eve's."""


def measured(server: Server, seconds: float, name: str, *, hostile: bool) -> Run:
    """One run, with Eve in a process of her own or without."""
    used = server.cpu_seconds()
    if hostile:
        command = [sys.executable, "-m", "benchmarks.hostile", "--seconds", str(seconds + 1), "--eve", server.address]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # she begins: her start, which costs a core for a second, is not measured
            p99 = asyncio.run(ann(server.address, seconds, name))
            said, _ = process.communicate(timeout=300)
    else:
        p99, said = asyncio.run(ann(server.address, seconds, name)), "{}"
    return Run(p99, server.cpu_seconds() - used, Counter(json.loads(said)))


def rows_of_eve(folder: str) -> int:
    with closing(sqlite3.connect(f"{folder}/keys.db")) as connection:
        (number,) = connection.execute("SELECT count(*) FROM idempotency_keys WHERE scope = 'eve'").fetchone()
        return int(number)


def shown(answers: Counter[str]) -> str:
    return (
        f"{answers.total():,} requests: {', '.join(f'{count:,} x {each}' for each, count in sorted(answers.items()))}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=16.0, help="of each run (16: 10,200 hostile requests in all)")
    parser.add_argument("--pairs", type=int, default=5, help="of runs, with Eve and without her")
    parser.add_argument("--eve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    seconds: float = options.seconds
    if options.eve:
        print(json.dumps(asyncio.run(eve(options.eve, seconds))))
        return 0
    ratios: list[float] = []
    total: Counter[str] = Counter()
    a_second = ", ".join(f"{EVES_PER_SECOND * KINDS.count(kind) // len(KINDS)} {kind}" for kind in dict.fromkeys(KINDS))
    print(f"limits of a tenant: {RATE} new keys a second, {CAP:,} keys, {LOOKUPS} misses a minute, bodies of 1 MiB")
    print(f"Ann sends {ANNS_PER_SECOND} new keys a second, Eve {EVES_PER_SECOND} requests: {a_second}. {load()}")
    with tempfile.TemporaryDirectory() as folder, served(folder) as server:
        for pair in range(options.pairs):
            found: dict[bool, Run] = {}
            for hostile in (False, True) if pair % 2 else (True, False):
                name = f"ann-{pair}-{hostile}"  # a new tenant for each run, so that Ann stays below the cap
                found[hostile] = measured(server, seconds, name, hostile=hostile)
            alone, beside = found[False], found[True]
            total += beside.answers
            ratios.append(beside.p99 / alone.p99)
            print(
                f"pair {pair + 1}: Ann's p99 {alone.p99:.1f} ms alone, {beside.p99:.1f} ms beside Eve: "
                f"{ratios[-1]:.2f}; the server computed {alone.cpu:.1f} and {beside.cpu:.1f} s; Eve has "
                f"{rows_of_eve(folder)} rows. Her {shown(beside.answers)}. {load()}",
                flush=True,
            )
        rows = rows_of_eve(folder)
    print(f"median ratio {statistics.median(ratios):.2f} (at most {CEILING}); Eve's rows {rows} (at most {CAP})")
    print(f"Eve's {shown(total)}")
    if not total["new 429"]:
        print("no new key of Eve was refused: this machine is too slow to send above the limit")
    return int(statistics.median(ratios) > CEILING or rows > CAP or not total["new 429"])


def load() -> str:
    """How busy the machine is: the runnable processes of the last minute."""
    return f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
