"""How often and for how long a client tries, and how long it waits in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from oncekey.errors import ConfigurationError

_MOST_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class Budget:
    """``tries`` and ``seconds`` bound one call. The first limit that is reached ends it.

    The wait before try n + 1 is chosen at random between 0 and ``first_wait * 2 ** (n - 1)``, at most ``longest_wait``
    (full jitter), so that clients that failed together do not come back together. ``Retry-After`` is obeyed: the client
    waits that long, plus up to ``first_wait``. If it is more than ``longest_wait``, or more than the time that is left,
    the client hands the answer back at once: it neither waits so long nor comes back too early.

    The defaults outlast oncekey's default lease of 60 seconds: if the server was killed while it worked on a request, a
    retry after that time runs it or learns its outcome.

    Questions after a request that the server still works on (409 in flight, 202) cost time, and no tries.
    """

    tries: int = 5
    seconds: float = 90.0
    first_wait: float = 0.5
    longest_wait: float = 60.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigurationError(f"Budget(tries={self.tries}): at least 1, which is no retry")
        for name in ("seconds", "first_wait", "longest_wait"):
            seconds = getattr(self, name)
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ConfigurationError(f"Budget({name}={seconds}): it takes a number of seconds over 0")

    def wait(self, number: int, retry_after: float | None, chance: float) -> float | None:
        """The seconds before the next request, after ``number`` of them; None: longer than this client waits.

        ``chance`` is a random number from 0 to 1.
        """
        if retry_after is not None:
            return None if retry_after > self.longest_wait else retry_after + chance * self.first_wait
        doublings = min(number - 1, _MOST_DOUBLINGS)
        return float(chance * min(self.longest_wait, self.first_wait * 2**doublings))


ONE_TRY: Final = Budget(tries=1)
