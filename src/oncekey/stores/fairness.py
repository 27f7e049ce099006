"""Hands out the keys of a duty that waits for providers: fairly by scope.

The reconciler asks a provider about each key, which may take seconds. By age alone, two thousand keys of one tenant
would delay the one key of another. So if more keys are due than ``due`` may return, half of the result is shared
between scopes in turn. The other half is the oldest keys, so that no key waits for ever.

A scope costs one probe of an index, for any number of keys. One call looks at up to ``VISITED`` scopes, and the next
call continues there. The other duties wait only for the store, which moves hundreds of keys in milliseconds: they take
the oldest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.api import Duty

VISITED = 200
"""How many scopes one call looks at, including scopes without a due key."""


FAIR: Mapping[Duty, State] = {Duty.UNKNOWNS: State.UNKNOWN, Duty.RESUMABLE: State.FAILED_RETRYABLE}
"""The duties that are handed out by scope, and the state of their keys. Only keys with a ``reconcile_at`` count."""

Visit = Callable[[str, int], Sequence[tuple[str, bool]]]
"""Takes a scope and a limit. Returns the next scopes in their order, and whether each has a due key."""
Take = Callable[[Sequence[str], int], Sequence[Record]]
"""Takes scopes and a limit. Returns the oldest due keys of these scopes, up to the limit for each."""


class Turns:
    """Remembers, for each duty, the scope that had the last turn. Each store object has its own."""

    def __init__(self) -> None:
        self._after: dict[Duty, str] = {}

    def hand_out(self, duty: Duty, limit: int, oldest: list[Record], visit: Visit, take: Take) -> list[Record]:
        """The keys to hand out, in turns. ``oldest``: the oldest due keys, at most ``limit``."""
        if duty not in FAIR:
            return oldest
        shared = limit // 2
        if len(oldest) < limit or shared == 0:  # these are all due keys, or only one is asked for
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
