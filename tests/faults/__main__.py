"""``make faults``: every fault with its long count on every store, two at a time, and a table of what was found.

    python -m tests.faults                      all of it, in under 40 minutes on two cores
    python -m tests.faults kill pause           those whose names contain one of these words
    python -m tests.faults --store sqlite       on this store alone; the rows of mysql, redis and dynamodb run only so
    python -m tests.faults --seed 7             repeats a run; without it a new seed is taken, and printed
    python -m tests.faults --scale 0.1          a tenth of each count
    python -m tests.faults --short              the counts of make test
    python -m tests.faults --write docs/guarantees.md

Each fault on each store is a process of its own, with a database of its own on one shared PostgreSQL. One that raises
is a row "broken", and the others go on. The exit code is 1 where anything was violated or broken. At the end come the
other long tests, ``pytest -m faults``, as one row.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from oncekey.testing.servers import PostgresServer
from tests.faults.campaign import Fault
from tests.faults.one_fault import Job, Rest, run_one
from tests.faults.report import Board, print_table, write_table
from tests.faults.table import faults

AT_ONCE = 2


def main() -> int:
    options = _options()
    if options.one:
        return run_one(options)
    seed = options.seed or random.SystemRandom().randrange(1, 2**31)
    chosen = [
        Job(fault, store, _count(options, fault, full), seed)
        for fault in faults()
        if not options.names or any(word in fault.name for word in options.names)
        for store, full in fault.counts.items()
        if (options.store == store or (options.store is None and store in fault.usual_stores))
        and _count(options, fault, full)
    ]
    rest = None if options.names or options.store or options.short else Rest()
    if not chosen and rest is None:
        print(f"no such fault; there are: {', '.join(sorted({fault.name for fault in faults()}))}")
        return 2
    print(f"seed {seed}: --seed {seed} repeats it", flush=True)
    with PostgresServer(fsync=False, settings={"max_connections": "300"}) as server:
        _run(chosen, rest, server)
    jobs = [*chosen, *([rest] if rest else [])]
    print_table(jobs, seed)
    if options.write:
        write_table(options.write, jobs, seed)
    return 1 if any(job.failed for job in jobs) else 0


def _run(chosen: list[Job], rest: Rest | None, server: PostgresServer) -> None:
    """The longest first, so that none is left alone at the end; the rest of the tests when nothing else runs."""
    waiting: list[Job | Rest] = sorted(chosen, key=lambda job: -job.seconds_expected)
    running: list[Job | Rest] = []
    board = Board(len(waiting))
    try:
        while waiting or running or rest:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start(server)
            if not waiting and not running and rest:
                running, rest = [rest], None
                running[0].start(server)
            for job in [job for job in running if not job.going_on()]:
                running.remove(job)
                board.ended(job)
            board.show(running, len(waiting))
            time.sleep(0.1)
    finally:
        board.close()
        for job in running:
            job.kill()


def _count(options: argparse.Namespace, fault: Fault, full: int) -> int:
    if options.short:
        return min(fault.short, full)
    return max(1, round(full * options.scale))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.faults", description="The fault campaign.")
    parser.add_argument("names", nargs="*", help="only faults whose names contain one of these words")
    parser.add_argument("--store", help="only this store")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("ONCEKEY_SEED", "0")))
    parser.add_argument("--scale", type=float, default=1.0, help="of each count")
    parser.add_argument("--short", action="store_true", help="the counts of make test")
    parser.add_argument("--write", metavar="FILE", help="put the table between the markers of this document")
    for name in ("one", "count", "folder", "server", "tell"):  # how it runs itself
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
