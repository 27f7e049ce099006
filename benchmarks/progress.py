"""How far a run is, and how long the rest will take.

Every step says beforehand what it should cost; what is left is scaled by how those that are done compared with that.
"""

from __future__ import annotations

import time


class Progress:
    def __init__(self, seconds: float) -> None:
        self.expected = seconds
        self._done = 0.0
        self._began = time.monotonic()

    def spent(self, seconds: float) -> None:
        """A step that should take so long has ended."""
        self._done += seconds

    @property
    def share(self) -> float:
        return min(1.0, self._done / self.expected) if self.expected else 1.0

    @property
    def left_seconds(self) -> float:
        """Until the first steps are done, as long as was expected."""
        took = time.monotonic() - self._began
        pace = took / self._done if self._done > 10 else 1.0
        return max(0.0, self.expected - self._done) * pace

    def prefix(self) -> str:
        return f"[{self.share:4.0%}, {clock(self.left_seconds)} left]  "


def clock(seconds: float) -> str:
    """Minutes and seconds, as a watch shows them."""
    whole = round(seconds)
    return f"{whole // 60:2}:{whole % 60:02}"
