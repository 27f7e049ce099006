"""Two settings of Python itself, for a server process.

**The garbage collector.** Python's defaults suit a script: a look after every 700 new objects, and now and then through
all of the imported code. A protected request waits twice for the store, so dozens of them are half done at any moment,
and each look walks through all of them to find nothing: measured here at a fifth of a request's CPU time. Reference
counting frees a request's objects anyway; the collector is only for cycles.

**The switch interval.** A thread that has done its work, a commit say, waits for the GIL until the event loop has held
it for this long, and everybody whose key is in that commit waits with it. Python's 5 milliseconds suit threads that
compute.
"""

from __future__ import annotations

import gc
import sys

PYTHONS_OWN = (700, 10, 10)
FOR_SERVERS = (10_000, 20, 20)
PYTHONS_INTERVAL = 0.005
SWITCH_SECONDS = 0.0002


def settle() -> None:
    """Once, when the app is up. An app that has chosen its own thresholds or interval, or has switched the collector
    off, keeps its choice."""
    if sys.getswitchinterval() == PYTHONS_INTERVAL:
        sys.setswitchinterval(SWITCH_SECONDS)
    if gc.isenabled() and gc.get_threshold() in (PYTHONS_OWN, (2000, 10, 0), (2000, 10, 10)):
        gc.collect()  # then leave out what is there for good, and look less often
        gc.freeze()
        gc.set_threshold(*FOR_SERVERS)
