"""What belongs to one process: what a forked child must not share with its parent, and the tokens of its owners.

Threads, queues and sockets are the parent's. Any object with an ``after_fork`` method can be enrolled. The method is
called in the child before the child does anything else (gunicorn preloads the app and forks, hazard 26). Only weak
references to the objects are kept.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Protocol


class Forkable(Protocol):
    def after_fork(self) -> None: ...


_enrolled: weakref.WeakSet[Forkable] = weakref.WeakSet()


def enroll(item: Forkable) -> None:
    _enrolled.add(item)


def _in_child() -> None:
    for item in list(_enrolled):
        item.after_fork()


os.register_at_fork(after_in_child=_in_child)


class Owners:
    """Makes owner tokens: never the same twice, in any thread, process or host.

    A token is a random part per process and a counter. ``secrets.token_hex`` per request would release the GIL in the
    middle of every request, for its system call. A token must be unique, but it need not be secret: it authenticates no
    caller.
    """

    def __init__(self) -> None:
        self.after_fork()
        enroll(self)

    def after_fork(self) -> None:
        """In a child: take a new random part, so that child and parent never make the same token."""
        self.new: Callable[[], str] = map(f"{secrets.token_hex(12)}-%x".__mod__, itertools.count(1)).__next__
        """The next token. All of it runs in C, so threads cannot get the same one."""
