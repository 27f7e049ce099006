"""What one attempt knows of the steps of its request, and whether the next step may begin.

``steps.py`` runs the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from oncekey.core.states import Effects
from oncekey.core.steps import REQUEST, STARTED, Step, StepKind, StepState
from oncekey.engine.sealed_steps import check_readable
from oncekey.errors import NotExecuted, StepError

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.operation import Operation

MAX_NAME_LENGTH = 100


class Steps:
    """What one attempt knows of the steps of its request."""

    __slots__ = ("cut_off", "known", "loaded", "not_executed", "open_effects", "phase", "under_way", "used", "waiting")

    def __init__(self) -> None:
        self.loaded = False
        self.under_way: str | None = None
        """The step that is running."""
        self.open_effects: list[str] = []
        """Effects of this attempt that may not be repeated, were called, and whose result is not known."""
        self.phase: str | None = None
        """The phase whose transaction is open."""
        self.known: dict[str, Step] = {}
        """The steps of earlier attempts, in their order."""
        self.waiting: set[str] = set()
        """Steps that earlier attempts have done, and that this attempt has not reached yet."""
        self.used: set[str] = set()
        self.cut_off = False
        """The call of an effect was cancelled. Its thread cannot be cancelled, and may still send the call."""
        self.not_executed: list[NotExecuted] = []
        """The NotExecuted errors that steps raised: each is about its own step only, not about the request."""

    def remember(self, found: Sequence[Step]) -> None:
        """Load the steps of earlier attempts. StoreError: one of them cannot be read."""
        check_readable(found)
        self.known = {step.name: step for step in found if not step.is_request}
        self.waiting = {name for name, step in self.known.items() if step.state is StepState.DONE}

    def reach(self, name: str, kind: StepKind) -> Step | None:
        """The step of this name, if an earlier attempt has done it. None: this attempt must run it."""
        self.used.add(name)
        self.waiting.discard(name)
        step = self.known.get(name)
        if step is None:
            if self.waiting:
                first = next(known for known in self.known if known in self.waiting)
                raise StepError(
                    f"step '{name}' is new, and comes before '{first}', which an earlier attempt has done already: the "
                    "order of steps has changed between the two. Add new steps at the end, or let old requests finish "
                    "before you deploy"
                )
            return None
        if step.kind is not kind:
            raise StepError(f"step '{name}' was a {step.kind} in an earlier attempt, and is a {kind} now: rename it")
        return step if step.state is StepState.DONE else None

    @classmethod
    def remembering(cls, found: Sequence[Step]) -> Self:
        steps = cls()
        steps.remember(found)
        steps.loaded = True
        return steps


def enter(operation: Operation, name: str) -> tuple[Engine, Steps]:
    """Check that a step may begin here, and mark it as under way."""
    engine = operation.engine
    if engine is None:
        raise StepError("this operation belongs to no request, so it has no steps")
    if operation.policy.effects_kind is not Effects.PHASED:
        raise StepError(
            f"{operation.name} is declared effects='{operation.policy.effects}': steps are remembered for "
            "Policy(effects='phased') only"
        )
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable() or name in (STARTED, REQUEST):
        raise StepError(
            f"a step's name has 1 to {MAX_NAME_LENGTH} printable characters, and is neither '{STARTED}' nor '{REQUEST}'"
        )
    steps = operation.steps = operation.steps or Steps()
    if operation.enlisted is not None:
        raise StepError(
            f"step '{name}' cannot begin while a transaction is open: a phase commits its own, and an effect must not "
            "be called while one is held open. End the phase first; use enqueue() for work that belongs to it"
        )
    if steps.under_way is not None:
        raise StepError(
            f"step '{name}' cannot begin while '{steps.under_way}' is under way: take steps one after another, or make "
            "one step of the two"
        )
    if name in steps.used:
        raise StepError(f"step '{name}' was used already in this request: each step has a name of its own")
    steps.under_way = name
    return engine, steps
