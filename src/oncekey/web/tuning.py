"""Two settings of Python itself, for a server process.

**The garbage collector.** Python's defaults suit a script: it searches for cycles after every 700 new objects, and
sometimes in all imported code. A protected request waits twice for the store, so dozens of requests are half done at
any moment. Each search walks through all of them and finds nothing: this cost a fifth of a request's CPU time.
Reference counting frees a request's objects; the collector is only for cycles.

**The switch interval.** A thread that has finished a commit waits for the GIL until the event loop has held it for
this long, and every request in that commit waits too. Python's 5 milliseconds suit threads that compute.

Both settings belong to the whole process. So ``protect(app, once, tune=False)`` does not change them, and oncekey
restores them when the last protected app of the process has shut down.
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
    """The settings that this process had before its first protected app started."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.apps = 0
        self.interval: float | None = None
        self.threshold: tuple[int, int, int] | None = None
        self.unfreeze = False
        self.collected = False


_settings = _Settings()


def settle() -> None:
    """Call this when an app has started. If the process has set its own thresholds or interval, or has switched the
    collector off, that stays."""
    with _settings.lock:
        _settings.apps += 1
        if sys.getswitchinterval() == PYTHONS_INTERVAL:
            _settings.interval = PYTHONS_INTERVAL
            sys.setswitchinterval(SWITCH_SECONDS)
        threshold = gc.get_threshold()
        if gc.isenabled() and threshold in (PYTHONS_OWN, (2000, 10, 0), (2000, 10, 10)):
            _settings.threshold = threshold
            _settings.unfreeze = gc.get_freeze_count() == 0  # otherwise the app has frozen objects of its own
            if not _settings.collected:  # once per process: a test suite starts its app a thousand times
                gc.collect()
                _settings.collected = True
            gc.freeze()  # the collector skips permanent objects, and searches the others less often
            gc.set_threshold(*FOR_SERVERS)


def restore() -> None:
    """Call this when an app that called ``settle`` has shut down. What the process has changed since then stays."""
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
