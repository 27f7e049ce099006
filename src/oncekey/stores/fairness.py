"""How a duty that waits for the outside world hands out its keys: fairly by scope.

The reconciler asks somebody about each key, which may take seconds. Were keys handed out by age alone, two thousand of
one tenant would stand before the one of another. So where more keys are due than were asked for, half of what
``due`` gives is shared between scopes in turn, and the other half is the oldest ones, so that no key waits for ever.

A scope costs one probe of an index, whatever it has; at most ``VISITED`` are looked at in one call, and the next call
goes on where this one ended. The other duties wait for nothing but the store, which moves hundreds of keys in
milliseconds: they take the oldest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.base import Duty

VISITED = 200
"""Scopes that one call looks at: those whose keys are all to be asked about later count too."""


FAIR: Mapping[Duty, State] = {Duty.UNKNOWNS: State.UNKNOWN, Duty.RESUMABLE: State.FAILED_RETRYABLE}
"""The duties that are handed out by scope, and the state of their keys: those of it that have a ``reconcile_at``."""

Visit = Callable[[str, int], Sequence[tuple[str, bool]]]
"""The next scopes after one, at most so many, in their order; and whether something of each is due."""
Take = Callable[[Sequence[str], int], Sequence[Record]]
"""The oldest keys of these scopes that are due, at most so many of each."""


class Turns:
    """Whose turn it is. A store has one for each duty, so each process goes round for itself."""

    def __init__(self) -> None:
        self._after: dict[Duty, str] = {}

    def hand_out(self, duty: Duty, limit: int, oldest: list[Record], visit: Visit, take: Take) -> list[Record]:
        """``oldest``: the oldest keys that are due, at most ``limit``. Which ones to hand out instead, in turns."""
        if duty not in FAIR:
            return oldest
        shared = limit // 2
        if len(oldest) < limit or shared == 0:  # all that are due, or the one that has waited longest
            return in_turns(oldest)
        after = self._after.get(duty, "")
        visited = visit(after, VISITED)
        scopes = [scope for scope, is_due in visited if is_due][:shared]
        if len(scopes) == shared:
            self._after[duty] = scopes[-1]
        else:
            self._after[duty] = visited[-1][0] if len(visited) == VISITED else ""
        chosen = {(row.scope, row.key): row for row in (take(scopes, shared // len(scopes)) if scopes else ())}
        for row in oldest:
            if len(chosen) >= limit:
                break
            chosen.setdefault((row.scope, row.key), row)
        return in_turns(sorted(chosen.values(), key=lambda row: (row.reconcile_at or 0.0, row.scope, row.key)))


def in_turns(rows: Sequence[Record]) -> list[Record]:
    """The first of each scope, then the second of each: the caller asks about a few at a time, in this order."""
    seen: Counter[str] = Counter()
    ranks = []
    for row in rows:
        ranks.append(seen[row.scope])
        seen[row.scope] += 1
    return [row for _, row in sorted(zip(ranks, rows, strict=True), key=lambda pair: pair[0])]
