"""What upkeep does next: when a row is due, and in which order due rows are handed out.

The SQL stores find due rows with their indexes. ``due_at``, ``to_purge``, ``is_over`` and ``Turns.hand_out_of``
say the same for stores that look at each row.

Keys of a duty that waits for providers are handed out **fairly by scope**. The reconciler asks a provider about each
key, which may take seconds. By age alone, two thousand keys of one tenant would delay the one key of another. So if
more keys are due than ``due`` may return, half of the result is shared between scopes in turn. The other half is the
oldest keys, so that no key waits for ever.

A scope costs one probe of an index, for any number of keys. One call looks at up to ``VISITED`` scopes, and the next
call continues there. The other duties wait only for the store, which moves hundreds of keys in milliseconds: they take
the oldest first.

Jobs of the outbox are claimed in the same way (:class:`JobTurns`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from oncekey.core.record import Record
from oncekey.core.states import FINAL, State
from oncekey.stores.api import Duty

VISITED = 200
"""How many scopes one call looks at, including scopes without a due key."""


FAIR: Mapping[Duty, State] = {Duty.UNKNOWNS: State.UNKNOWN, Duty.RESUMABLE: State.FAILED_RETRYABLE}
"""The duties that are handed out by scope, and the state of their keys. Only keys with a ``reconcile_at`` count."""

Visit = Callable[[str, int], Sequence[tuple[str, bool]]]
"""Takes a scope and a limit. Returns the next scopes in their order, and whether each has a due key."""
NextScope = Callable[[str], tuple[str, bool] | None]
"""Takes a scope. Returns the next scope that has ready jobs, and whether one of them is due. None: it was the last."""
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

    def hand_out_of(self, rows: Iterable[Record], duty: Duty, limit: int, now: float) -> list[Record]:
        """``Store.due`` for a store that looks at each row."""
        rows = list(rows)
        due = oldest_due(rows, duty, now)
        waiting = sorted({row.scope for row in rows if due_at(row, duty) is not None})
        due_scopes = {row.scope for row in due}

        def visit(after: str, most: int) -> list[tuple[str, bool]]:
            return [(scope, scope in due_scopes) for scope in waiting if scope > after][:most]

        def take(scopes: Sequence[str], most: int) -> list[Record]:
            return [row for scope in scopes for row in [row for row in due if row.scope == scope][:most]]

        return self.hand_out(duty, limit, due[:limit], visit, take)


class JobTurns:
    """Which part of a claim is taken in turns by scope. Each store object has its own.

    A claim that takes all due jobs needs no turns: it takes the oldest first. After a claim that was full, more jobs
    may be due than one claim takes. Then half of the next claim is shared between the scopes that have due jobs.
    """

    def __init__(self) -> None:
        self._after: str | None = None
        """The scope that had the last turn. None: the last claim was not full."""
        self._rounds_up = False

    def share(self, limit: int) -> tuple[int, str]:
        """How many jobs the next claim takes in turns, and the scope after which it begins.

        An odd ``limit`` is halved in turn up and down, so claims of one job alternate between a scope's turn and the
        oldest job.
        """
        after = self._after
        if after is None:
            return 0, ""
        self._rounds_up = not self._rounds_up
        return (limit + self._rounds_up) // 2, after

    def claimed(self, full: bool, shared: int, last: str | None) -> None:
        """A claim took as many jobs as it asked for, or fewer. ``last``: the last scope that had a turn; None: no scope
        is left after it, and the next turns begin with the first scope."""
        if not full:
            self._after = None
        elif shared or self._after is None:
            self._after = last or ""

    @staticmethod
    def visit(shared: int, after: str, following: NextScope) -> tuple[list[str], str | None]:
        """The scopes whose turn it is, and the ``last`` for :meth:`claimed`. For stores that probe one scope after the
        other; a store that can do this in its claim need not call it."""
        scopes: list[str] = []
        for _ in range(VISITED):
            found = following(after)
            if found is None:
                return scopes, None
            after, is_due = found
            if is_due:
                scopes.append(after)
                if len(scopes) == shared:
                    break
        return scopes, after


def in_turns(rows: Sequence[Record]) -> list[Record]:
    """The first of each scope, then the second of each: the caller asks about a few at a time, in this order."""
    seen: Counter[str] = Counter()
    ranks = []
    for row in rows:
        ranks.append(seen[row.scope])
        seen[row.scope] += 1
    return [row for _, row in sorted(zip(ranks, rows, strict=True), key=lambda pair: pair[0])]


def due_at(row: Record, duty: Duty) -> float | None:
    """When a row becomes due for a duty; None: never, in its present state."""
    match duty:
        case Duty.LEASES if row.state is State.IN_PROGRESS:
            return row.lease_until
        case Duty.EXPIRED if row.state in FINAL:
            return row.expires_at
        case Duty.EXPIRED if row.state is State.FAILED_RETRYABLE and not row.has_steps:
            return row.expires_at
        case Duty.LAPSED if row.state is State.FAILED_RETRYABLE and row.has_steps:
            return row.expires_at
        case Duty.RESUMABLE if row.state is State.FAILED_RETRYABLE:
            return row.reconcile_at
        case Duty.ABANDONED if row.state is State.PENDING:
            return row.expires_at
        case Duty.UNKNOWNS if row.state is State.UNKNOWN:
            return row.reconcile_at
    return None


def deleted_at(row: Record) -> float | None:
    """When an expired row is deleted: it is kept for a second retention. None: never, in its present state."""
    return row.expires_at + row.retention_seconds if row.state is State.EXPIRED else None


def oldest_due(rows: Iterable[Record], duty: Duty, now: float) -> list[Record]:
    """The rows that are due, oldest first; without their responses."""
    found = [(when, row) for row in rows if (when := due_at(row, duty)) is not None and when <= now]
    found.sort(key=lambda pair: (pair[0], pair[1].scope, pair[1].key))
    return [replace(row, response=None, now=now) for _, row in found]


def to_purge(rows: Iterable[Record], now: float, limit: int, *, expired_state_only: bool) -> list[Record]:
    """The rows that ``Store.purge`` deletes: final keys past their expiry, then those in the state ``expired``.

    The oldest of each come first.
    """
    rows = list(rows)
    expired = [] if expired_state_only else oldest_due(rows, Duty.EXPIRED, now)
    over = [(when, row) for row in rows if (when := deleted_at(row)) is not None and when <= now]
    over.sort(key=lambda pair: (pair[0], pair[1].scope, pair[1].key))
    return (expired + [row for _, row in over])[:limit]


def is_over(row: Record | None) -> bool:
    """Whether the audit of a key may be purged: the key is final, expired, or deleted."""
    return row is None or row.state in (*FINAL, State.EXPIRED)
