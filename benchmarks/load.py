"""Compiles and runs ``load.c``, and says loudly what went wrong when an answer was not the one asked for.

Owns the generator's command line and the meaning of its one line of JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Mode = Literal["bare", "first", "replay", "mix"]
SOURCE = Path(__file__).with_name("load.c")
BODY = '{"amount":1299,"currency":"EUR","recipient":"acct_42"}'
MIXED = (0.08, 0.12)
"""Least and most share of replays in a mix: a tenth, but those that were under way at either end of the window."""
SLACK = 120.0
"""Seconds on top of warm-up and measurement: priming (60 at most), draining (10 at most), a busy machine."""


class LoadFailed(Exception):
    """The generator could not run, or saw something else than the 2xx answers that were asked for."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the generator, measured after its warm-up."""

    mode: Mode
    rps: float
    requests: int
    answered: int
    """With those of priming, warm-up and draining: what CPU time is divided by."""
    replayed: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    generator_cpu: float
    """Share of one core that the generator itself took: it runs beside what it measures."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compiler() -> str | None:
    """The C compiler: $CC, or the first of the usual names on PATH."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_generator(into: Path) -> Path:
    """Build ``load.c`` into the folder, in about a third of a second."""
    found = compiler()
    if found is None:
        raise LoadFailed("no C compiler: the load generator needs cc, gcc or clang (or $CC)")
    program = into / "load"
    command = [found, "-std=c11", "-D_GNU_SOURCE", "-O2", "-o", str(program), str(SOURCE)]
    built = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if built.returncode != 0:
        raise LoadFailed(f"{SOURCE.name} does not compile (it needs Linux, for epoll):\n{built.stderr}")
    return program


def run(
    program: Path,
    port: int,
    mode: Mode,
    *,
    connections: int = 64,
    seconds: float = 5.0,
    warmup: float = 1.0,
    path: str = "/payments",
    keys: int = 1000,
    body: str = BODY,
    marked: bool = True,
    run: str | None = None,
) -> Measured:
    """Load 127.0.0.1:port once; LoadFailed unless every answer was a 2xx of the asked-for kind.

    ``marked``: this app says with a header when an answer is a replay, so it is checked how many were. ``run``: 12 hex
    digits; the same ones again make the same keys. Without it, all keys are new.
    """
    command = [
        str(program),
        *("--port", str(port), "--mode", mode, "--connections", str(connections)),
        *("--seconds", str(seconds), "--warmup", str(warmup), "--path", path),
        *("--run", run or secrets.token_hex(6), "--keys", str(keys), "--body", body),
    ]
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds + warmup + SLACK)
    except subprocess.TimeoutExpired as late:
        raise LoadFailed(f"{mode}: the generator did not end within {late.timeout:.0f} s") from late
    if ended.returncode != 0:
        if '"requests":0' in ended.stdout and not ended.stderr:
            raise LoadFailed(f"{mode}: no request was answered within {seconds:g} s")
        raise LoadFailed(f"{mode}: the load failed\n{ended.stderr.strip()}\n{ended.stdout.strip()}")
    answer = json.loads(ended.stdout)
    measured = Measured(
        mode=mode,
        rps=answer["rps"],
        requests=answer["requests"],
        answered=answer["answered"],
        replayed=answer["replayed"],
        p50_ms=answer["latency_ms"]["p50"],
        p90_ms=answer["latency_ms"]["p90"],
        p99_ms=answer["latency_ms"]["p99"],
        max_ms=answer["latency_ms"]["max"],
        generator_cpu=answer["cpu_share"],
    )
    if marked and not _as_asked(measured):
        raise LoadFailed(f"{mode}: {measured.replayed} of {measured.requests} answers were replays")
    return measured


def _as_asked(measured: Measured) -> bool:
    """Whether as many answers were replays as this mode makes."""
    if measured.mode == "mix":
        least, most = MIXED
        return least <= measured.replayed / measured.requests <= most
    return measured.replayed == (measured.requests if measured.mode == "replay" else 0)
