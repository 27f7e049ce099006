"""Whether a key that is not known may be reserved: what ``Engine.begin`` asks before it writes.

Requests with a known key are never asked about: they get the stored answer at any age, and count for no limit.
"""

from __future__ import annotations

from oncekey.core.decision import TurnedAway
from oncekey.engine.flows import Flow


class Admission:
    """The admission of one request."""

    def __init__(self, refused: TurnedAway | None) -> None:
        self._refused = refused
        """The request itself cannot have a new key."""

    def of_new_key(self) -> Flow[TurnedAway | None]:
        """None: reserve the key, inside of ``with admission``."""
        yield from ()
        return self._refused

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
