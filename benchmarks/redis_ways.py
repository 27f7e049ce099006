"""Three ways to speak with Redis, compared: ``python -m benchmarks.redis_ways``, about two minutes.

``protocol``: the store's own protocol in the event loop (``stores/redis/in_loop.py``). ``redis.asyncio``: the same
scripts, in a pipeline of redis-py's asynchronous client (with hiredis, if it is installed). ``lanes``: the store's
threads, as with TLS. The same requests go through the same app (``in_process.py``), 32 at once, in a process of its own
for each way. The ways take turns in each round.

It prints, for one request, the CPU time of the app's process (kernel and all threads included) and the elapsed time of
the run; then the medians, and the CPU time as a multiple of the first way's. ``--instructions`` counts with valgrind
instead, once: no other program disturbs that, and the kernel is not in it.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import callgrind
from benchmarks.in_process import AT_ONCE, serve
from benchmarks.serving import ROOT, child_environment
from oncekey.testing.servers import RedisServer

MODES = ("first", "replay")
NUMBER, COUNTED = 6_400, 768
"""Requests that are timed, and that are counted."""


class _AsyncioWire:
    """In the place of ``in_loop._Wire``: the commands of a batch as a pipeline of redis-py."""

    dead = False
    batches = 0

    def __init__(self, link: Any) -> None:
        from redis.asyncio import Redis

        self.link = link
        self._client = Redis(host=link.address[0], port=link.address[1])
        self._client.response_callbacks.clear()  # the store reads the answers itself
        self._commands: Sequence[Sequence[bytes]] = ()

    def send(self, commands: Sequence[Sequence[bytes]]) -> None:
        self._commands = commands

    async def receive(self, count: int, deadline: float) -> list[Any]:
        del count, deadline
        pipeline = self._client.pipeline(transaction=False)
        for each in self._commands:
            pipeline.execute_command(*each)
        answers = list(await pipeline.execute())
        _AsyncioWire.batches += 1
        return answers

    def close(self) -> None:
        self.link.close()


WAYS: dict[str, Callable[[], Any]] = {
    "protocol": nullcontext,
    "redis.asyncio": lambda: patch("oncekey.stores.redis.in_loop._Wire", _AsyncioWire),
    "lanes": lambda: patch("oncekey.stores.redis.RedisStore.in_loop", lambda store: None),
}


def measure(way: str, mode: str, url: str) -> tuple[float, float]:
    """CPU and elapsed seconds of the measured requests, in this process."""
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.process_time(), time.perf_counter()))

    with WAYS[way]():
        serve(mode, NUMBER, url, begin=mark, end=mark)
    if way == "redis.asyncio" and _AsyncioWire.batches < NUMBER / AT_ONCE:
        raise SystemExit("lanes did its work, after an error")
    (cpu, began), (cpu_after, ended) = marks
    return cpu_after - cpu, ended - began


def _timed(way: str, mode: str, url: str) -> tuple[float, float]:
    """Microseconds of one request."""
    cpu, elapsed = _run([], "--one", way, mode, url).stdout.split()[-2:]
    return float(cpu) / NUMBER * 1e6, float(elapsed) / NUMBER * 1e6


def _counted(way: str, mode: str, url: str, library: Path) -> float:
    """Instructions of one request."""
    costs = library.with_name("callgrind.out")
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={costs}"]
    ran = _run(valgrind, "--one", way, mode, url, "--count", str(library))
    found = re.search(r"Collected : (\d+)", ran.stderr)
    if found is None:
        raise SystemExit(ran.stderr[-2000:])
    return int(found[1]) / COUNTED


def _run(before: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "benchmarks.redis_ways", *arguments]
    environment = child_environment() | {"PYTHONHASHSEED": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if ran.returncode != 0:
        raise SystemExit(ran.stderr[-2000:])
    return ran


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis_ways", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--instructions", action="store_true", help="count them with valgrind, once")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "MODE", "URL"), help="of one process: for the parent")
    parser.add_argument("--count", metavar="LIBRARY", help="of one process, under valgrind")
    options = parser.parse_args()
    if options.count:
        way, mode, url = options.one
        with WAYS[way]():
            callgrind.counted_process(mode, str(COUNTED), url, options.count, "", str(AT_ONCE))
    elif options.one:
        print(*measure(*options.one))
    else:
        logging.disable(logging.WARNING)  # this Redis is not durable
        with RedisServer() as server:
            if options.instructions:
                _count(server)
            else:
                _measure(server, options.rounds)


def _count(server: RedisServer) -> None:
    with TemporaryDirectory() as folder:
        library = callgrind.build(Path(folder))
        for mode in MODES:
            beside = 0.0
            for way in WAYS:
                count = _counted(way, mode, _ready(server), library)
                beside = beside or count
                print(f"{mode:7} {way:14} {count:11,.0f} instructions   {count / beside:.2f}", flush=True)


def _measure(server: RedisServer, rounds: int) -> None:
    spent: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn, mode, way in product(range(rounds), MODES, WAYS):
        cpu, elapsed = _timed(way, mode, _ready(server))
        spent.setdefault((mode, way), []).append((cpu, elapsed))
        print(f"round {turn + 1}  {mode:7} {way:14} {cpu:7.1f} µs CPU {elapsed:7.1f} µs", flush=True)
    for mode, way in product(MODES, WAYS):
        cpu, elapsed = (statistics.median(each) for each in zip(*spent[mode, way], strict=True))
        ratios = [one / other for (one, _), (other, _) in zip(spent[mode, way], spent[mode, "protocol"], strict=True)]
        extremes = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        print(f"{mode:7} {way:14} {cpu:7.1f} µs CPU {elapsed:7.1f} µs   {extremes}")


def _ready(server: RedisServer) -> str:
    from oncekey.stores.redis import RedisStore

    server.flush()
    store = RedisStore(server.url)
    store.init()
    store.close()
    return server.url


if __name__ == "__main__":
    main()
