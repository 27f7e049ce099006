"""What a forked child must not share with its parent: threads, queues and sockets.

Any object with an ``after_fork`` method can be enrolled. The method is called in the child before the child does
anything else (gunicorn preloads the app and forks, hazard 26). Only weak references to the objects are kept.
"""

from __future__ import annotations

import os
import weakref
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
