"""What a request costs Redis and the connection to it, without HTTP: ``python -m benchmarks.redis_rows``, 20 seconds.

Batches go through the store's own way for event loops, one after the other. For each size of batch it prints, for one
request: the CPU time of the server, the time that it spent in scripts (``INFO commandstats``), how many commands it ran
in them, the bytes each way, and the CPU time of this process. A first request is two round trips, shared by its batch:
the ends of the last batch travel with the beginnings of the next one.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.pgbench import BODY, FINGERPRINT, HEADERS
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Effects
from oncekey.core.swaps import End
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.in_loop import InLoop
from oncekey.testing.servers import RedisServer

SIZES = (1, 8, 32)
PREPARED = 1024
"""Keys that are replayed. All sizes divide it."""
_ANSWER = StoredResponse(201, tuple((name, content) for name, content in json.loads(HEADERS)), BODY)
_Batch = Callable[[], Awaitable[None]]


class _Owner:
    """What an End needs of its attempt, if no thread lane has to take it over."""

    record: Any = None


def _wanted(key: str) -> Reservation:
    owner = uuid.uuid4().hex
    return Reservation("bench", key, "POST /payments", FINGERPRINT, 2, Effects.EXTERNAL, owner, 60.0, 86400.0)


def _end(of: Reservation) -> End:
    return End(of.scope, of.key, of.owner, _ANSWER, _Owner())


def _firsts(store: InLoop, size: int) -> _Batch:
    last: list[Reservation] = []

    async def batch() -> None:
        nonlocal last
        new = [_wanted(uuid.uuid4().hex) for _ in range(size)]
        if last:
            found, ended = await store.both(new, [_end(each) for each in last])
            if None in ended:
                raise SystemExit("an end found no row")
        else:
            found = await store.reserve(new)
        if any(type(each) is not float for each in found):
            raise SystemExit("a new key was there")
        last = new

    return batch


def _replays(store: InLoop, size: int, keys: list[str]) -> _Batch:
    turn = 0

    async def batch() -> None:
        nonlocal turn
        found = await store.reserve([_wanted(key) for key in keys[turn : turn + size]])
        turn = (turn + size) % len(keys)
        if any(not isinstance(each, Record) or each.response != _ANSWER for each in found):
            raise SystemExit("a replay was not the answer")

    return batch


async def _prepared(store: InLoop) -> list[str]:
    wanted = [_wanted(uuid.uuid4().hex) for _ in range(PREPARED)]
    for start in range(0, PREPARED, 32):
        await store.reserve(wanted[start : start + 32])
        await store.swap([_end(each) for each in wanted[start : start + 32]])
    return [each.key for each in wanted]


def _info(server: RedisServer) -> dict[str, float]:
    spent: dict[str, float] = {"calls": 0, "scripts": 0}
    for line in server.command("INFO", "commandstats").splitlines():
        name, _, numbers = line.partition(":")
        if not name.startswith("cmdstat_") or name in ("cmdstat_info", "cmdstat_config|resetstat"):
            continue
        values = dict(each.split("=") for each in numbers.split(","))
        if name == "cmdstat_evalsha":
            spent["scripts"] += float(values["calls"])
            spent["in_scripts"] = float(values["usec"])
        else:
            spent["calls"] += float(values["calls"])
    for line in server.command("INFO", "stats").splitlines():
        name, _, number = line.partition(":")
        if name in ("total_net_input_bytes", "total_net_output_bytes"):
            spent[name] = float(number)
    return spent


def _cpu_seconds(pid: int) -> float:
    """Nanoseconds are in schedstat; stat has hundredths of a second."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def _measure(server: RedisServer, store: InLoop, seconds: float) -> dict[str, dict[str, float]]:
    keys = await _prepared(store)
    told = {}
    for size in SIZES:
        for name, batch in (("first", _firsts(store, size)), ("replay", _replays(store, size, keys))):
            for _ in range(20):
                await batch()
            before, cpu, own = _info(server), _cpu_seconds(server.pid), time.process_time()
            until, batches = time.perf_counter() + seconds, 0
            while time.perf_counter() < until:
                await batch()
                batches += 1
            own, cpu, after = time.process_time() - own, _cpu_seconds(server.pid) - cpu, _info(server)
            rows = batches * size
            told[f"{name}, {size} at once"] = {
                "server µs": cpu * 1e6 / rows,
                "in scripts µs": (after["in_scripts"] - before["in_scripts"]) / rows,
                "scripts": (after["scripts"] - before["scripts"]) / rows,
                "commands": (after["calls"] - before["calls"]) / rows,
                "bytes there": (after["total_net_input_bytes"] - before["total_net_input_bytes"]) / rows,
                "bytes back": (after["total_net_output_bytes"] - before["total_net_output_bytes"]) / rows,
                "client µs": own * 1e6 / rows,
            }
    return told


async def _run(server: RedisServer, seconds: float) -> dict[str, dict[str, float]]:
    store = RedisStore(server.url)
    store.init()
    in_loop = store.in_loop()
    assert in_loop is not None
    try:
        return await _measure(server, in_loop, seconds)
    finally:
        in_loop.abandon()
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis_rows", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--durable", action="store_true", help="each command is on disk before its answer")
    options = parser.parse_args()
    import uvloop

    with RedisServer(durable=options.durable) as server:
        told = uvloop.run(_run(server, min(max(options.seconds, 0.2), 60.0)))
    columns = list(next(iter(told.values())))
    print(f"{'':18}" + "".join(f"{column:>14}" for column in columns))
    for name, values in told.items():
        print(f"{name:18}" + "".join(f"{values[column]:14,.1f}" for column in columns))


if __name__ == "__main__":
    main()
