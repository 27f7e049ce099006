"""Whether the time of a 404 tells that a key exists: ``python -m benchmarks.timing``.

Bob asks the status endpoint for keys that are not his, and for keys that were never used. Both get a 404 with the same
bytes. This program takes the time of 20,000 such answers, half of each kind in random order, and compares the two
means by Welch's t. Exit status 1: |t| is 4.5 or more somewhere.

=========== ============================================================ ==========================================
case        the key that exists                                          why Bob gets a 404
=========== ============================================================ ==========================================
tenant      is Ann's, who is another tenant                              the look-up is by (tenant, key)
bound       is of another user of Bob's tenant, and bound to that user   ``Policy(bind=…)``
operation   is of an operation that Bob may not use                      ``OnceKey(authorize=…)``
planted     does not exist, and counts as 10 % slower                    a control: this must be seen
=========== ============================================================ ==========================================

Each case is asked in this process, by a call of the ASGI app, and through uvicorn, by one connection to a process of
its own. Both pools have 500 keys of the same length, so no key is asked more often than another one.

It prints t of all samples, of the fastest 99 % and of the fastest half, by one bound for both kinds. What other
programs of the machine do is in the slow samples, so the fastest half shows the smallest difference: the last two
columns are the difference of its means, and from which difference on t would be 4.5.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, quantiles, variance
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from oncekey import NotAuthorized, OnceKey, Policy, Request
from oncekey.testing.servers import PostgresServer, ServerUnavailable
from oncekey.web.starlette import protect
from oncekey.web.status import status_app

ROOT = Path(__file__).resolve().parent.parent
CEILING = 4.5
"""|t| from which two means count as different. By chance it is reached once in 150,000 comparisons."""
POOL = 500
PLANTED = 1.1
CASES = ("tenant", "bound", "operation", "planted")
PACED = ("bound", "operation")
"""The status endpoint waits before these 404s, so samples of them take longer."""
STORES = ("sqlite", "postgres")
HEAD = """\
| case | store | way | samples | exists, µs | never, µs | more, µs | t | t of 99 % | t of 50 % | more, µs | seen from |
|---|---|---|---|---|---|---|---|---|---|---|---|"""
CASE, STORE = "TIMING_CASE", "TIMING_STORE"
_KEPT: list[OnceKey] = []

Ask = Callable[[str], Awaitable[float]]


# ---------------------------------------------------------------- the app


def tenant_of(request: Request) -> str:
    return request.headers["x-tenant"]


def user_of(request: Request) -> str:
    return request.headers["x-user"]


def authorize(request: Request, operation: str) -> None:
    if operation == "POST /payments" and user_of(request) == "bob":
        raise NotAuthorized


async def pay(request: HttpRequest) -> JSONResponse:
    return JSONResponse({"paid": await request.json(), "note": "x" * 200}, 201)


def application(case: str, url: str) -> Starlette:
    once = OnceKey(
        url,
        scope=tenant_of,
        authorize=authorize if case == "operation" else None,
        policy=Policy(bind=user_of) if case == "bound" else Policy(),
        bind_secret="a secret for this measurement only" if case == "bound" else None,
        migrate=True,
    )
    _KEPT.append(once)
    routes = [Route("/payments", pay, methods=["POST"]), Mount("/idempotency", status_app(once))]
    app = Starlette(routes=routes)
    protect(app, once, upkeep=False)
    return app


def create() -> Starlette:
    """For uvicorn."""
    return application(os.environ[CASE], os.environ[STORE])


def closed() -> None:
    while _KEPT:
        _KEPT.pop().close()


# ---------------------------------------------------------------- the keys


def keys() -> list[str]:
    return [uuid.uuid4().hex for _ in range(POOL)]


async def used_keys(case: str, url: str) -> list[str]:
    """Keys of payments that Ann has made."""
    made = keys()
    tenant = "ann" if case == "tenant" else "acme"
    transport = httpx.ASGITransport(application(case, url))
    async with httpx.AsyncClient(transport=transport, base_url="http://timing") as client:
        for key in made:
            headers = {"X-Tenant": tenant, "X-User": "ann", "Idempotency-Key": key}
            answer = await client.post("/payments", headers=headers, json={"amount": 1})
            if answer.status_code != 201:
                raise RuntimeError(f"a payment was answered with {answer.status_code}: {answer.text}")
    return made


# ---------------------------------------------------------------- asking


def asked_in_process(app: Any, tenant: str) -> Ask:
    """Bob's question as a call of the app; returns the seconds until the last byte."""
    always: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
    }
    always |= {"query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "server": ("timing", 80)}
    always["headers"] = [(b"host", b"timing"), (b"x-tenant", tenant.encode()), (b"x-user", b"bob")]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ask(key: str) -> float:
        sent.clear()
        path = f"/idempotency/{key}"
        scope = dict(always, path=path, raw_path=path.encode())
        begun = time.perf_counter()
        await app(scope, receive, send)
        took = time.perf_counter() - begun
        if sent[0]["status"] != 404:
            raise RuntimeError(f"answered with {sent[0]['status']}")
        return took

    return ask


def asked_by_socket(connection: socket.socket, tenant: str) -> Ask:
    async def ask(key: str) -> float:
        question = f"GET /idempotency/{key} HTTP/1.1\r\nHost: timing\r\nX-Tenant: {tenant}\r\nX-User: bob\r\n\r\n"
        begun = time.perf_counter()
        connection.sendall(question.encode())
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        took = time.perf_counter() - begun
        if not answer.startswith(b"HTTP/1.1 404"):
            raise RuntimeError(f"answered with {answer[:200]!r}")
        return took

    return ask


@contextmanager
def served(case: str, url: str) -> Iterator[socket.socket]:
    """A connection to uvicorn, which serves this app."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "benchmarks.timing:create", "--factory", "--port", str(port)]
    environment = os.environ | {CASE: case, STORE: url}
    process = subprocess.Popen([*command, "--no-access-log", "--log-level", "warning"], cwd=ROOT, env=environment)
    try:
        connection = _connected(port, time.monotonic() + 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            yield connection
    finally:
        process.terminate()
        process.wait(15)


def _connected(port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class Compared:
    """Two kinds of answers, in seconds."""

    exists: Sequence[float]
    never: Sequence[float]

    @property
    def number(self) -> int:
        return len(self.exists) + len(self.never)

    @property
    def error(self) -> float:
        """The standard error of the difference."""
        return sqrt(variance(self.exists) / len(self.exists) + variance(self.never) / len(self.never))

    @property
    def t(self) -> float:
        """Welch's t: the difference of the means in units of its standard error."""
        return self.difference / self.error

    @property
    def difference(self) -> float:
        return fmean(self.exists) - fmean(self.never)

    @property
    def smallest(self) -> float:
        """The smallest difference that these samples would show."""
        return abs(CEILING * self.error)

    def fastest(self, percent: int) -> Compared:
        """Only the fastest so many percent of all samples, by one bound for both kinds."""
        bound = quantiles([*self.exists, *self.never], n=100)[percent - 1]
        return Compared([each for each in self.exists if each < bound], [each for each in self.never if each < bound])


async def compared(ask: Ask, exists: Sequence[str], never: Sequence[str], number: int, seed: int) -> Compared:
    dice = random.Random(seed)
    order = [True, False] * (number // 2)
    dice.shuffle(order)
    for key in never[: min(100, number // 20)]:
        await ask(key)  # connections, and code that Python has specialised
        await ask(dice.choice(exists))
    took: dict[bool, list[float]] = {True: [], False: []}
    for one in order:
        took[one].append(await ask(dice.choice(exists if one else never)))
    return Compared(took[True], took[False])


def slower(ask: Ask, marked: frozenset[str]) -> Ask:
    """The control: what exists costs more."""

    async def asked(key: str) -> float:
        return await ask(key) * (PLANTED if key in marked else 1.0)

    return asked


async def measured(case: str, url: str, way: str, number: int, seed: int) -> Compared:
    try:
        exists = keys() if case == "planted" else await used_keys(case, url)
        tenant = "bob" if case in ("tenant", "planted") else "acme"
        with ExitStack() as stack:
            if way == "uvicorn":
                ask = asked_by_socket(stack.enter_context(served(case, url)), tenant)
            else:
                ask = asked_in_process(application(case, url), tenant)
            if case == "planted":
                ask = slower(ask, frozenset(exists))
            return await compared(ask, exists, keys(), number, seed)
    finally:
        closed()


# ---------------------------------------------------------------- the command


def line(case: str, store: str, way: str, found: Compared) -> str:
    """A row of docs/security.md."""
    half = found.fastest(50)
    means = f"{fmean(found.exists) * 1e6:.1f} | {fmean(found.never) * 1e6:.1f} | {found.difference * 1e6:+.1f}"
    ts = f"{found.t:+.2f} | {found.fastest(99).t:+.2f} | {half.t:+.2f}"
    halves = f"{half.difference * 1e6:+.1f} | {half.smallest * 1e6:.1f}"
    return f"| {case} | {store} | {way} | {found.number:,} | {means} | {ts} | {halves} |"


def passes(case: str, found: Compared) -> bool:
    """Whether the two kinds cannot be told apart; the control: whether they can."""
    largest = max(abs(each.t) for each in (found, found.fastest(99), found.fastest(50)))
    return largest > CEILING if case == "planted" else largest < CEILING


@contextmanager
def addresses(stores: Sequence[str]) -> Iterator[dict[str, Callable[[str], str]]]:
    """For each kind of store that can run here: a function from a name to the address of an empty one."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-timing-"))
        found: dict[str, Callable[[str], str]] = {}
        if "sqlite" in stores:
            found["sqlite"] = lambda name: f"sqlite:///{folder}/{name}.db"
        if "postgres" in stores:
            try:
                found["postgres"] = stack.enter_context(PostgresServer()).database
            except ServerUnavailable as error:
                print(f"without PostgreSQL: {error}")
        yield found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timing", description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--paced", type=int, default=2_000, help="samples of 404s that the status endpoint delays")
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--store", action="append", choices=STORES, default=[])
    parser.add_argument("--way", action="append", choices=("in process", "uvicorn"), default=[])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args(arguments)
    stores, failed = options.store or STORES, 0
    print(f"seed {options.seed}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(HEAD, flush=True)
    with addresses(stores) as places:
        for store, address in places.items():
            for case in options.case or CASES:
                for way in options.way or ("in process", "uvicorn"):
                    number = options.paced if case in PACED else options.samples
                    url = address(f"{case}_{way.replace(' ', '_')}")
                    found = asyncio.run(measured(case, url, way, number, options.seed))
                    failed += not passes(case, found)
                    print(line(case, store, way, found), "" if passes(case, found) else "<- FAILED", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
