"""Owner tokens: never the same twice, in any thread, process or host.

A random part per process and a counter. Not ``secrets.token_hex`` per request: its system call gives the GIL away in
the middle of every request, and unique is all that a fence has to be; nobody is authenticated by it.
"""

from __future__ import annotations

import itertools
import secrets

from oncekey.engine import forks


class Owners:
    def __init__(self) -> None:
        self.after_fork()
        forks.enroll(self)

    def new(self) -> str:
        return f"{self._process}-{next(self._count):x}"

    def after_fork(self) -> None:
        """A child must not count on where its parent does."""
        self._process = secrets.token_hex(12)
        self._count = itertools.count(1)
