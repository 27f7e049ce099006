"""Two large ledgers with 100 planted differences, compared in a process of its own, whose peak of memory counts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

LARGE = '''
import json, random, resource, sys, time
from oncekey.ledger.comparison import Entry, compare

rows, seed = int(sys.argv[1]), int(sys.argv[2])
planted = random.Random(seed).sample(range(rows), 100)
kinds = {number: place % 5 for place, number in enumerate(planted)}

def side(theirs):
    # Every number once, in an order that is neither side's order of ids: a step that shares no factor with their count.
    step = 7919 if theirs else 104729
    for place in range(rows):
        number = (place * step + seed) % rows
        entry = Entry(f"ch_{number * 2654435761 % 2**32:010}_{number}", number * 7, "EUR", "paid", f"line {place}")
        kind = kinds.get(number)
        if kind == (1 if theirs else 0):
            continue
        if theirs and kind in (2, 3):
            entry = entry._replace(amount=1 + entry.amount) if kind == 2 else entry._replace(state="open")
        yield entry
        if theirs and kind == 4:
            yield entry

def peak():
    """Of this program alone: what getrusage says may be the memory of the process that started it."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

started = time.monotonic()
report = compare(side(False), side(True))
print(json.dumps({
    "found": sorted([str(finding.kind), int(finding.id.rpartition("_")[2])] for finding in report.findings),
    "planted": sorted([["missing_here", "missing_there", "different", "different", "duplicate_there"][kind], number]
                      for number, kind in kinds.items()),
    "same": report.same,
    "seconds": time.monotonic() - started,
    "kilobytes": peak(),
}))
'''


def compare_large(rows: int) -> dict[str, Any]:
    """So many rows on each side. Asserts that exactly the planted ones are found; says ``kilobytes``, ``seconds``."""
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"\nseed {seed}: ONCEKEY_SEED={seed} repeats it")
    command = [sys.executable, "-c", LARGE, str(rows), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    print(f"{2 * rows:,} rows: {said['seconds']:.1f} s, {said['kilobytes'] / 1024:.0f} MB")
    assert said["found"] == said["planted"]
    assert (len(said["found"]), said["same"]) == (100, rows - 100)
    return said
