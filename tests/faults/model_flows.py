"""What the requests of the model do: handlers that keep to what their route declares, and places in them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from oncekey.core.decision import Decision
from oncekey.core.judgment import Move
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects
from oncekey.core.swaps import Swap, swap
from oncekey.engine import steps
from oncekey.engine.flows import Call, Pause
from oncekey.engine.operation import Operation
from oncekey.errors import LeaseLost
from oncekey.stores.api import Duty
from oncekey.web.endings import answered, raised

if TYPE_CHECKING:
    from tests.faults.model_machine import Machine


# -- what a flow may ask for, beside the store's verbs -----------------------------------------------------------------


@dataclass(frozen=True)
class Choose:
    """Whatever the handler does, every one of these is tried."""

    ways: tuple[str, ...]


@dataclass(frozen=True)
class Outside:
    """A call that counts; ``key`` where the other side honours one."""

    key: str | None


class Began(NamedTuple):
    """The handler runs: nothing is asked."""

    record: Record


class Enlist(NamedTuple):
    record: Record


class Commit(NamedTuple):
    """The business write and the key's move, or neither."""

    change: Swap


class RollBack(NamedTuple):
    pass


class Ask(NamedTuple):
    """The resolver looks at what happened outside."""


class Due(NamedTuple):
    duty: Duty


class Told(NamedTuple):
    """The end of a request: what its client got, and what it was decided from."""

    status: int
    body: bytes
    decision: Decision | None


Flow = Generator[Any, Any, Any]


@dataclass(frozen=True)
class Kind:
    """A way to declare a route, with a handler that keeps to it."""

    name: str
    effects: Effects
    handler: Callable[[Machine, Kind, Operation], Flow]
    honours: bool = False
    """Whether a call outside is made under a key that the other side honours."""
    soft: bool = False
    """Expired keys are kept in the state ``expired``."""
    resumed: bool = False
    """The last of those with the same body is no client but upkeep, which goes on with what is half done."""
    deployed: Kind | None = None
    """How every request but the first finds the route declared."""


def external(machine: Machine, kind: Kind, operation: Operation) -> Flow:
    """Refused, turned away, declined, or one call; and what follows the call may raise."""
    # Where a second run is harmless, an earlier one may have called: then it is not declined any more.
    how = yield Choose(("call", "refuse", "503") if kind.honours else ("call", "refuse", "503", "422"))
    if how == "refuse":
        operation.refuse()
        return _returns(machine, operation, 422, b"refused")
    if how != "call":
        if int(how) >= 500:
            operation.not_executed()
        return _returns(machine, operation, int(how), operation.owner.encode())
    yield Outside(operation.downstream_key("charge") if kind.honours else None)
    return (yield from _answered(machine, operation))


def phased(machine: Machine, kind: Kind, operation: Operation) -> Flow:
    """One effect, by the engine's own flow."""
    work = Outside(operation.downstream_key("charge") if kind.honours else None)
    try:
        yield from steps.effect(operation, "charge", lambda: work, kind.honours, None)
    except LeaseLost as error:
        return _raises(machine, operation, error)
    return (yield from _answered(machine, operation))


def transactional(machine: Machine, kind: Kind, operation: Operation) -> Flow:
    """All in the enlisted transaction, which holds the row until it ends."""
    if not (yield Enlist(operation.record)):
        return _raises(machine, operation, LeaseLost("before it enlisted"))
    move = yield from _answered(machine, operation)
    if not operation.commits:
        yield RollBack()
        return move
    done: Record | None = yield Commit(swap(operation.record, move.event, Actor.OWNER, response=move.response))
    return move if done is None else Told(move.response.status, move.response.body or b"", None)


def _answered(machine: Machine, operation: Operation) -> Flow:
    how = yield Choose(("return", "raise"))
    if how == "raise":
        return _raises(machine, operation, RuntimeError("after the call"))
    return _returns(machine, operation, 201, operation.owner.encode())


def _returns(machine: Machine, operation: Operation, status: int, body: bytes) -> Move:
    operation.evidence.entered()
    operation.evidence.returned_with(status)
    return answered(operation, status, [], body, machine.once)[0]


def _raises(machine: Machine, operation: Operation, error: Exception) -> Move:
    operation.evidence.entered()
    operation.evidence.raised_with(error, None)
    return raised(operation, error, machine.once)[0]


KINDS = (
    Kind("external", Effects.EXTERNAL, external),
    Kind("external, soft expiry", Effects.EXTERNAL, external, soft=True),
    Kind("transactional", Effects.TRANSACTIONAL, transactional),
    Kind("phased, repeatable", Effects.PHASED, phased, honours=True),
    Kind("phased, unrepeatable", Effects.PHASED, phased),
    Kind("repeatable", Effects.REPEATABLE, external, honours=True),
)

_EXTERNAL, _, _TRANSACTIONAL, _PHASED_AGAIN, _PHASED, _REPEATABLE = KINDS
CHANGED = tuple(
    replace(before, name=f"{before.name}, then {now.name}", deployed=now)
    for before in (_EXTERNAL, _TRANSACTIONAL, _PHASED, _PHASED_AGAIN, _REPEATABLE)
    for now in (_EXTERNAL, _TRANSACTIONAL, _PHASED, _REPEATABLE)
    if now.effects is not before.effects
)
"""A deploy between two attempts, for each pair of declarations."""
RESUMED = tuple(replace(kind, name=f"{kind.name}, resumed", resumed=True) for kind in (_PHASED_AGAIN, _PHASED))
"""Upkeep goes on with a half-done request."""


# -- where requests stand ---------------------------------------------------------------------------------------------


class Node:
    """A place in a flow: what was answered so far decides what it wants next, so it is computed once."""

    __slots__ = ("answers", "began", "called", "children", "ended", "flow", "wants")

    def __init__(self, flow: Callable[[], Flow], answers: tuple[Any, ...]) -> None:
        self.flow, self.answers = flow, answers
        self.children: dict[Any, Node] = {}
        self.began: Record | None = None
        self.called = False
        self.wants: Any = None
        self.ended: Any = None
        left = list(reversed(answers))
        running = flow()
        try:
            want = next(running)
            while True:
                if isinstance(want, Call):
                    want = want.do()  # an effect's function: it says what it calls
                if isinstance(want, Began):
                    self.began = want.record
                if isinstance(want, Pause | Began):
                    want = running.send(None)
                elif left:
                    self.called |= isinstance(want, Outside)
                    want = running.send(left.pop())
                else:
                    self.wants = want
                    return
        except StopIteration as end:
            self.ended = end.value
        finally:
            running.close()

    @property
    def over(self) -> bool:
        return self.wants is None

    def then(self, answer: Any) -> Node:
        node = self.children.get(answer)
        if node is None:
            node = self.children[answer] = Node(self.flow, (*self.answers, answer))
        return node
