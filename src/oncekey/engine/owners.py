"""Owner tokens: never the same twice, in any thread, process or host.

A token is a random part per process and a counter. ``secrets.token_hex`` per request would release the GIL in the
middle of every request, for its system call. A token must be unique, but it need not be secret: it authenticates no
caller.
"""

from __future__ import annotations

import itertools
import secrets

from oncekey.engine import process


class Owners:
    def __init__(self) -> None:
        self.after_fork()
        process.enroll(self)

    def new(self) -> str:
        return f"{self._process}-{next(self._count):x}"

    def after_fork(self) -> None:
        """In a child: take a new random part, so that child and parent never make the same token."""
        self._process = secrets.token_hex(12)
        self._count = itertools.count(1)
