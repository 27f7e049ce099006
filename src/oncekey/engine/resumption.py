"""What a resume function gets: the operation of a half-done request whose client does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.kept_request import request_in
from oncekey.core.policy import Policy
from oncekey.core.record import Record
from oncekey.core.responses import Response
from oncekey.core.steps import Step, StepState
from oncekey.core.values import value
from oncekey.engine.known_steps import Steps
from oncekey.engine.operation import Operation

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine


class Resumption(Operation):
    """An Operation whose attempt upkeep has begun. For steps that are done, ``phase`` and ``effect`` return the stored
    result.

    ``request`` is the client's request, if the route has ``Policy(keep_request=True)``; otherwise None.
    """

    __slots__ = ()

    def __init__(
        self,
        record: Record,
        policy: Policy,
        scope: str,
        engine: Engine,
        loop: asyncio.AbstractEventLoop | None,
        found: Sequence[Step],
    ) -> None:
        super().__init__(record, policy, scope, engine, loop, covered=True)
        self.steps = Steps.remembering(found)
        self.request = request_in(found)

    def result(self, name: str) -> Any:
        """The result of the step of this name, if an earlier attempt has done it; otherwise None.

        A step whose result was read counts as passed, so new steps may follow.
        """
        steps = self.steps
        step = steps.known.get(name) if steps is not None else None
        if steps is None or step is None or step.state is not StepState.DONE:
            return None
        steps.waiting.discard(name)
        return orjson.loads(step.result or b"null")


Answer = Response | tuple[int, Any]
"""The final response: ``Response(status, json)``, or ``(status, json)``."""
ResumeFunction = Callable[[Resumption], Answer | Awaitable[Answer]]
"""Continues a half-done request, sync or async. It runs the steps of the handler with the same names and in the same
order, and returns the response that the client's retry gets."""


@value
class Registered:
    """What ``once.resume`` was given for an operation."""

    function: ResumeFunction
    policy: Policy | None
    """The policy of the route, if only the app declares it and upkeep does not start the app."""
