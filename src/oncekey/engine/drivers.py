"""The two loops that drive flows: one awaits in an event loop, one blocks in a thread.

A flow (``flows.py``) yields what it wants. Work for the store goes to a lane. A ``Call`` is made in the
loop or thread that drives the flow. A ``Pause`` ends early if this process finishes a request of the same key.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import SyncTicket, answered, whole
from oncekey.engine.flows import Aside, Call, Flow, Pause
from oncekey.errors import ApplicationError, OperatorError

_log = logging.getLogger("oncekey")

_T = TypeVar("_T")


class Drivers:
    """Drives flows over the lanes of one store. :class:`oncekey.engine.engine.Engine` adds the flows of a request."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.closed = False
        self.waiters: dict[tuple[str, str], list[Callable[[], None]]] = {}

    if TYPE_CHECKING:

        def open(self) -> None: ...

    async def run(self, flow: Flow[_T], timeout: float) -> _T:
        """Drive a flow from a coroutine; each question to the store may take ``timeout`` seconds."""
        if self.closed:
            self._open_again()
        loop = asyncio.get_running_loop()
        try:
            step = next(flow)
            while True:
                if isinstance(step, Aside):
                    try:
                        answer = await self._aside(step, loop)
                    except (Exception, asyncio.CancelledError) as error:  # a cancelled flow may still clean up
                        step = flow.throw(error)
                    else:
                        step = flow.send(answer)
                    continue
                future: asyncio.Future[Any] | None = None
                try:
                    future = self.router.ask(step, loop, timeout)
                    answer = await future
                except asyncio.CancelledError:
                    if future is not None and answered(future):  # cancelled when its answer was already there
                        self.router.give_up(step, future.result())
                    flow.close()  # now, not when the traceback is garbage-collected
                    raise
                except OperatorError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(whole(step, answer))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def run_blocking(self, flow: Flow[_T], timeout: float) -> _T:
        """Drive a flow from a thread."""
        if self.closed:
            self._open_again()
        try:
            step = next(flow)
            while True:
                if isinstance(step, Aside):
                    try:
                        answer = self._aside_blocking(step)
                    except Exception as error:
                        step = flow.throw(error)
                    else:
                        step = flow.send(answer)
                    continue
                ticket = SyncTicket(step)
                try:
                    self.router.submit(ticket)
                    answer = ticket.wait(timeout)
                except OperatorError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _aside(self, aside: Aside, loop: asyncio.AbstractEventLoop) -> Any:
        if isinstance(aside, Call):
            answer = aside.do()
            return await answer if inspect.isawaitable(answer) else answer
        assert isinstance(aside, Pause)  # noqa: S101 - an Aside is a Call or a Pause
        return await self._pause(aside, loop)

    def _aside_blocking(self, aside: Aside) -> Any:
        if isinstance(aside, Call):
            answer = aside.do()
            if inspect.isawaitable(answer):
                if inspect.iscoroutine(answer):
                    answer.close()
                raise ApplicationError("op.blocking takes plain functions: this one is async. Await op.… in async code")
            return answer
        assert isinstance(aside, Pause)  # noqa: S101 - an Aside is a Call or a Pause
        woken = threading.Event()
        with self._waiting(aside.at, woken.set):
            woken.wait(aside.seconds)
        return None

    async def _pause(self, pause: Pause, loop: asyncio.AbstractEventLoop) -> None:
        woken = asyncio.Event()
        with (
            self._waiting(pause.at, lambda: _wake(loop, woken)),
            suppress(TimeoutError),
        ):
            await asyncio.wait_for(woken.wait(), pause.seconds)

    @contextmanager
    def _waiting(self, at: tuple[str, str], wake: Callable[[], None]) -> Iterator[None]:
        """Inside this block, a finish of this key in this process calls ``wake``."""
        waiters = self.waiters.setdefault(at, [])
        waiters.append(wake)
        try:
            yield
        finally:
            waiters.remove(wake)
            if not waiters:
                self.waiters.pop(at, None)

    def wake(self, at: tuple[str, str]) -> None:
        """Wake the flows of this process that wait for this key."""
        for wake in list(self.waiters.get(at, ())):
            wake()

    def _open_again(self) -> None:
        _log.debug("a closed OnceKey is used, and so it opens again: close it once more at the end")
        self.open()


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed, so no coroutine waits in it
        loop.call_soon_threadsafe(woken.set)
