"""Two settings of Python itself, for a server process.

**The garbage collector.** Python's defaults suit a script: a look after every 700 new objects, and now and then through
all of the imported code. A protected request waits twice for the store, so dozens of them are half done at any moment,
and each look walks through all of them to find nothing: measured here at a fifth of a request's CPU time. Reference
counting frees a request's objects anyway; the collector is only for cycles.

**The switch interval.** A thread that has done its work, a commit say, waits for the GIL until the event loop has held
it for this long, and everybody whose key is in that commit waits with it. Python's 5 milliseconds suit threads that
compute.

Both are the process's, so ``protect(app, once, tune=False)`` leaves them alone, and what was changed is changed back
when the last protected app of the process has shut down.
"""

from __future__ import annotations

import gc
import sys
import threading

PYTHONS_OWN = (700, 10, 10)
FOR_SERVERS = (10_000, 20, 20)
PYTHONS_INTERVAL = 0.005
SWITCH_SECONDS = 0.0002


class _Settings:
    """What this process had before, while protected apps are up in it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.apps = 0
        self.interval: float | None = None
        self.threshold: tuple[int, int, int] | None = None
        self.unfreeze = False
        self.collected = False


_settings = _Settings()


def settle() -> None:
    """When an app is up. A process that has chosen its own thresholds or interval, or has switched the collector off,
    keeps its choice."""
    with _settings.lock:
        _settings.apps += 1
        if sys.getswitchinterval() == PYTHONS_INTERVAL:
            _settings.interval = PYTHONS_INTERVAL
            sys.setswitchinterval(SWITCH_SECONDS)
        threshold = gc.get_threshold()
        if gc.isenabled() and threshold in (PYTHONS_OWN, (2000, 10, 0), (2000, 10, 10)):
            _settings.threshold = threshold
            _settings.unfreeze = gc.get_freeze_count() == 0  # else the app has frozen objects of its own
            if not _settings.collected:  # once: a test suite starts its app a thousand times
                gc.collect()
                _settings.collected = True
            gc.freeze()  # what is there for good is left out, and the rest looked at less often
            gc.set_threshold(*FOR_SERVERS)


def restore() -> None:
    """When an app that called ``settle`` has shut down. What the process has changed since stays."""
    with _settings.lock:
        _settings.apps -= 1
        if _settings.apps > 0:
            return
        if _settings.interval is not None and abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6:
            sys.setswitchinterval(_settings.interval)
        if _settings.threshold is not None and gc.get_threshold() == FOR_SERVERS:
            gc.set_threshold(*_settings.threshold)
            if _settings.unfreeze:
                gc.unfreeze()
        _settings.interval = _settings.threshold = None
