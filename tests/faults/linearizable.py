"""Whether what many clients saw of one key can have happened one after the other (linearizability, per key).

**Theory of operation.** A history is a list of calls, each with the moments at which it began and was answered, and
what its client saw. It is legal if each call can be given *points* in time, between its begin and its end, so that a
single key, moved at these points one after the other, gives every client what it saw. A key is a register that moves
in two kinds of points, because an execution is not one moment but the time between two:

========== ==================================================== ================================================
point      the key before                                        the key after
========== ==================================================== ================================================
reserve    absent; or retryable, of the same request             in progress, owned by this call
settle     in progress, owned by this call                       completed(result), retryable, unknown, or absent
look       as the answer says                                    the same
========== ==================================================== ================================================

What a client saw says which points its call has:

* ``EXECUTED`` result: reserve, then settle as completed. Both before the answer: it is stored before it is sent (I2).
* ``RELEASED``: reserve, then settle as retryable (the handler has proven that nothing happened).
* ``DOUBTED``: reserve, then settle as unknown (the handler raised).
* ``REPLAYED`` result: one look at completed(result) of the same request; the same bytes, or it is another answer.
* ``BUSY``: one look at a key in progress, of the same request. So 409 is legal only while an execution may run.
* ``MISMATCH``: one look at a key of *another* request, in whatever state. Never at an absent key, and never a run (I5).
* ``UNKNOWN``: one look at an unknown key.
* ``LOST``: no answer, or one that says nothing (503, a cut). It may have done nothing; or it has reserved, at any time
  after its begin, and settled in any way, at any time after that, or never. No client was sent what it
  completed with: the first replay shows it, and all others must agree.

Completed and unknown are final here: histories are shorter than any expiry, and no reconciler runs meanwhile.

**The search** is that of Wing and Gong with a memory of the positions it has been in: take any call whose turn it may
be (no call that waits for its turn was answered before this one began), and go on from there; go back where that leads
nowhere. Three observations make it short. A look changes nothing, so it is taken as soon as it fits. While a key is in
progress nothing but its owner's settling can change it, so that is taken when no look fits any more. And of the lost
calls with the same request the earliest can stand for every other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Saw(StrEnum):
    """What a client saw of its call."""

    EXECUTED = "executed"
    REPLAYED = "replayed"
    BUSY = "409 in progress"
    MISMATCH = "422"
    UNKNOWN = "409 unknown"
    RELEASED = "not executed"
    DOUBTED = "raised"
    LOST = "lost"


LOOKS = frozenset({Saw.REPLAYED, Saw.BUSY, Saw.MISMATCH, Saw.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Call:
    """One request of one client."""

    asked: str
    """The request itself, as its fingerprint tells it from others."""
    began: float
    ended: float
    saw: Saw
    result: bytes | str | None = None
    """Of EXECUTED and REPLAYED: the answer's status and bytes."""
    client: str = ""
    """Who, for the reader of a history."""

    @property
    def until(self) -> float:
        """When its last point must have been."""
        return math.inf if self.saw is Saw.LOST else self.ended


class Phase(StrEnum):
    ABSENT = "absent"
    IN_PROGRESS = "in progress"
    RETRYABLE = "retryable"
    COMPLETED = "completed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Key:
    """The key between two points."""

    phase: Phase = Phase.ABSENT
    asked: str | None = None
    result: bytes | str | None = None
    """Of COMPLETED. None: completed by a lost call, with a response that was never seen."""
    owner: int | None = None
    """Of IN_PROGRESS: the number of the call."""

    def looked(self, call: Call) -> Key | None:
        """The key after this look; None: it cannot have looked now."""
        same = self.asked == call.asked
        match call.saw:
            case Saw.REPLAYED if same and self.phase is Phase.COMPLETED and self.result in (None, call.result):
                return self if self.result is not None else replace(self, result=call.result)
            case Saw.BUSY if same and self.phase is Phase.IN_PROGRESS:
                return self
            case Saw.UNKNOWN if same and self.phase is Phase.UNKNOWN:
                return self
            case Saw.MISMATCH if not same and self.phase is not Phase.ABSENT:
                return self
        return None

    def reserved(self, call: Call, number: int) -> Key | None:
        """The key in progress, owned by this call; None: it cannot have been reserved now."""
        free = self.phase is Phase.ABSENT or (self.phase is Phase.RETRYABLE and self.asked == call.asked)
        return Key(Phase.IN_PROGRESS, call.asked, owner=number) if free and call.saw not in LOOKS else None

    def settled(self, call: Call) -> Iterator[Key]:
        """What the key may have become at the end of this call's execution."""
        if call.saw is Saw.EXECUTED:
            yield Key(Phase.COMPLETED, self.asked, call.result)
            return
        lost = call.saw is Saw.LOST
        if lost:
            yield Key(Phase.COMPLETED, self.asked)
        if lost or call.saw is Saw.RELEASED:
            yield Key(Phase.RETRYABLE, self.asked)
        if lost or call.saw is Saw.DOUBTED:
            yield Key(Phase.UNKNOWN, self.asked)
        if lost:
            yield Key()


def illegal(history: Sequence[Call]) -> str | None:
    """None: the history is linearizable. Otherwise why not, and the whole history, to be printed."""
    search = _Search(sorted(history, key=lambda call: call.began))
    if search.explains(search.everybody, Key()):
        return None
    return search.complaint()


class _Search:
    """Sets of calls are integers with a bit for each: many of them are remembered."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self.everybody = (1 << len(calls)) - 1
        self._answered = [number for number, call in enumerate(calls) if call.saw is not Saw.LOST]
        self._answered_bits = sum(1 << number for number in self._answered)
        self._by_end = sorted(self._answered, key=lambda number: calls[number].ended)
        self._hopeless: set[tuple[int, Key]] = set()
        self._best: tuple[int, int, Key] = (len(calls) + 1, 0, Key())

    def explains(self, waiting: int, key: Key) -> bool:
        """Whether the calls in ``waiting`` can have followed on ``key``. An owner waits until it has settled."""
        waiting, key = self._look(waiting, key)
        left = waiting & self._answered_bits
        if not left:
            return True
        position = (waiting, key)
        if position in self._hopeless:
            return False
        self._best = min(self._best, (left.bit_count(), waiting, key), key=lambda best: best[0])
        if any(self.explains(*after) for after in self._moves(waiting, key)):
            return True
        self._hopeless.add(position)
        return False

    def _now(self, waiting: int) -> float:
        """The first end of a waiting call: a call that began after it must wait for it."""
        for number in self._by_end:
            if waiting >> number & 1:
                return self._calls[number].ended
        return math.inf

    def _turns(self, waiting: int) -> Iterator[tuple[int, Call]]:
        now = self._now(waiting)
        for number, call in enumerate(self._calls):
            if call.began > now:
                return
            if waiting >> number & 1:
                yield number, call

    def _look(self, waiting: int, key: Key) -> tuple[int, Key]:
        """Take every look that fits, and those whose turn it is by that."""
        looking = True
        while looking:
            looking = False
            for number, call in self._turns(waiting):
                after = key.looked(call) if call.saw in LOOKS else None
                if after is not None:
                    waiting &= ~(1 << number)
                    key = after
                    looking = True
        return waiting, key

    def _moves(self, waiting: int, key: Key) -> Iterator[tuple[int, Key]]:
        if key.owner is not None:
            for end in key.settled(self._calls[key.owner]):
                yield waiting & ~(1 << key.owner), end
            return
        lost: set[str] = set()
        for number, call in self._turns(waiting):
            if call.saw is Saw.LOST:
                if call.asked in lost:
                    continue
                lost.add(call.asked)
            if (after := key.reserved(call, number)) is not None:
                yield waiting, after

    def complaint(self) -> str:
        _, waiting, key = self._best
        stuck = ", ".join(
            f"{call.client or number} ({call.saw})" for number, call in self._turns(waiting) if call.saw is not Saw.LOST
        )
        return f"no order explains it: with the key {key.phase} it cannot be the turn of {stuck}\n{told(self._calls)}"


def told(history: Sequence[Call]) -> str:
    """A history for people: milliseconds since its begin, who, what was asked, and what was seen."""
    start = min((call.began for call in history), default=0.0)
    lines = []
    for call in sorted(history, key=lambda call: call.began):
        result = f" {call.result!r}" if call.result is not None else ""
        lines.append(
            f"  {(call.began - start) * 1000:9.3f} to {(call.ended - start) * 1000:9.3f} ms  {call.client:>12} asked "
            f"{call.asked}: {call.saw}{result}"
        )
    return "\n".join(lines)
