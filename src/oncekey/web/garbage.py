"""The garbage collector of a server process, set for servers.

Python's defaults suit a script: a look after every 700 new objects, and now and then through all of the imported code.
A protected request waits twice for the store, so dozens of them are half done at any moment, and each look walks
through all of them to find nothing: measured here at a fifth of a request's CPU time. Reference counting frees a
request's objects anyway; the collector is only for cycles.
"""

from __future__ import annotations

import gc

PYTHONS_OWN = (700, 10, 10)
FOR_SERVERS = (10_000, 20, 20)


def settle() -> None:
    """Once, when the app is up: leave out what is there for good, and look less often.

    An app that has chosen its own thresholds, or has switched the collector off, keeps its choice.
    """
    if gc.isenabled() and gc.get_threshold() in (PYTHONS_OWN, (2000, 10, 0), (2000, 10, 10)):
        gc.collect()
        gc.freeze()
        gc.set_threshold(*FOR_SERVERS)
