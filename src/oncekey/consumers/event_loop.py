"""The consumer for client libraries of asyncio; ``consumer.py`` has the settings, and ``blocking.py`` the twin."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from oncekey.consumers import signals
from oncekey.consumers.consumer import ANSWERED, COPY_FAILED, NOT_EXTENDED, Consumer, Raw
from oncekey.consumers.message import Message
from oncekey.consumers.table import LONG_SECONDS, Action, Hold, Outcome, Situation, at_the_limit
from oncekey.errors import ConfigurationError, MessageNotRun

_log = logging.getLogger("oncekey")


class AsyncConsumer(Consumer[Raw]):
    """For client libraries of asyncio. A handler that is a plain function runs in a thread.

    ``concurrency``: how many messages are handled at the same time. If ``run`` is cancelled, or the process gets
    SIGTERM (``signals.py``), it takes no more messages and gives the running handlers ``OnceKey(grace=…)`` seconds to
    end.
    """

    def __init__(self, *args: Any, concurrency: int = 10, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigurationError(
                f"{type(self).__name__}(concurrency={concurrency!r}): it takes a whole number, 1 or more"
            )
        self.concurrency = concurrency
        self._is_async = inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(
            getattr(self.handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._in_hand: dict[int, Raw] = {}
        self._extending: asyncio.Task[None] | None = None

    # -- the adapter's verbs

    async def consume(self) -> None:
        """Take messages and hand them to ``_spawn``, until cancelled. ``run`` calls it."""
        raise NotImplementedError

    @abstractmethod
    async def ack(self, raw: Raw) -> None:
        """It is done with: the broker forgets it."""

    @abstractmethod
    async def retry(self, raw: Raw, delay: float) -> None:
        """Let the broker deliver it again, after ``delay`` seconds if the broker can do that."""

    async def limit_reached(self, raw: Raw) -> str | None:
        """The broker's limit of deliveries, if this is the last one: ``max_deliver=5``. None: there are more."""
        del raw
        return None

    async def extend_every(self) -> float:
        """With ``extends``: how many seconds there are between two calls of :meth:`extend`."""
        raise NotImplementedError

    async def extend(self, raw: Raw) -> None:
        """With ``extends``: tell the broker that the message is still in hand."""

    @abstractmethod
    async def copy(self, raw: Raw, place: str, headers: dict[str, str]) -> None:
        """Return when the broker has stored the copy."""

    def is_answered(self, raw: Raw) -> bool:
        """Whether the handler answered the broker itself, as far as the library knows."""
        del raw
        return False

    # --

    async def run(self) -> None:
        """Consume until cancelled, or until the process gets SIGTERM or SIGINT: then it returns."""
        task, loop, stopped = asyncio.current_task(), asyncio.get_running_loop(), False
        assert task is not None  # noqa: S101 - a coroutine runs in a task

        def cancel() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        def stop() -> None:
            loop.call_soon_threadsafe(cancel)

        with signals.stopping(stop):
            try:
                await self.consume()
            except asyncio.CancelledError:
                if not stopped or task.uncancel() > 0:  # the app cancelled it, too
                    raise

    async def on_message(self, raw: Raw) -> Outcome:
        """Handle one delivery and answer the broker. For a loop of your own; ``run`` calls it, too.

        While the store does not answer, or another delivery of the message is being handled, this keeps the message.
        """
        self._take(raw)
        try:
            message, outcome, error = await self._kept(raw)
            if self.is_answered(raw):
                _log.error(ANSWERED, self.queue_of(raw))
                return outcome
            limit = None if outcome.action is Action.ACK else await self._limit(raw)
            if limit is not None and outcome.action is Action.RETRY:
                outcome = at_the_limit(outcome, limit)
            self._ended(message, outcome, error)
            if outcome.action is Action.ACK:
                await self._acknowledge(raw)
            elif outcome.action is Action.RETRY:
                await self._give_back(raw, outcome.delay)
            else:
                await self._move(raw, message.name, outcome, limit)
        except Exception as error:
            if id(raw) in self._in_hand:  # a setting is wrong, so the message was not even looked up
                await self._not_looked_up(raw, error)
            raise
        finally:
            self._in_hand.pop(id(raw), None)
        return outcome

    async def _not_looked_up(self, raw: Raw, error: Exception) -> None:
        if (limit := await self._limit(raw)) is None:
            await self._give_back(raw, LONG_SECONDS)
            return
        never_asked = Outcome(Situation.NO_STORE, Action.RETRY, 0.0, f"looking it up raised {type(error).__name__}")
        await self._move(raw, f"a message of {self.queue_of(raw)}", at_the_limit(never_asked, limit), limit)

    async def _move(self, raw: Raw, name: str, outcome: Outcome, limit: str | None) -> None:
        """Copy the message to the dead letters or the parking place, and acknowledge it."""
        place = self.places[outcome.action]
        try:
            await self.copy(raw, place, self._headers(raw, outcome))
        except Exception:
            then = "and will be delivered again" if limit is None else f"and the broker delivers it no more ({limit})"
            _log.exception(COPY_FAILED, name, place, then)
            await self._give_back(raw, LONG_SECONDS)
        else:
            await self._acknowledge(raw)

    async def _limit(self, raw: Raw) -> str | None:
        try:
            return await self.limit_reached(raw)
        except Exception as error:
            _log.warning("the broker did not say how often it delivers a message of %s (%s)", self.queue_of(raw), error)
            return None

    async def _acknowledge(self, raw: Raw) -> None:
        del self._in_hand[id(raw)]
        await self.ack(raw)

    async def _give_back(self, raw: Raw, delay: float) -> None:
        del self._in_hand[id(raw)]
        await self.retry(raw, delay)

    async def _kept(self, raw: Raw) -> tuple[Message, Outcome, BaseException | None]:
        """Run the message, or keep it until its outcome is known."""
        hold = Hold()
        while True:
            message, error = await self._deliver(raw)
            outcome = message.outcome
            assert outcome is not None  # noqa: S101 - a message that ended has one
            pause = hold.pause(outcome) if self.holds and not self._stopping.is_set() else None
            if pause is None:
                return message, outcome, error
            self._held(message, outcome)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _deliver(self, raw: Raw) -> tuple[Message, BaseException | None]:
        message = self._message(raw)
        try:
            async with message:
                if self._is_async:
                    await self.handler(raw)
                else:
                    result = await asyncio.to_thread(self.handler, raw)
                    if inspect.isawaitable(result):  # such as a lambda that calls an async function
                        await result
        except MessageNotRun:
            pass
        except BaseException as error:
            if message.outcome is None or not self._is_failure(error):
                raise
            return message, error
        return message, None

    def _is_failure(self, error: BaseException) -> bool:
        """Whether the handler failed with this. Otherwise this process, or this task, is to end.

        ``sys.exit()`` in a handler would end the event loop, and with it all other handlers, at every delivery.
        """
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return task is not None and not task.cancelling()
        if isinstance(error, KeyboardInterrupt):
            return not (self._stopping.is_set() or signals.may_be_a_signal(error))
        return isinstance(error, Exception | SystemExit)

    # -- the broker's time for an answer

    def _take(self, raw: Raw) -> None:
        self._in_hand[id(raw)] = raw
        if self.extends and self._extending is None:
            self._extending = asyncio.create_task(self._extend_all())

    async def _extend_all(self) -> None:
        """Extend the messages in hand, until there are none."""
        try:
            every = await self.extend_every()
            while self._in_hand:
                await asyncio.sleep(every)
                for raw in list(self._in_hand.values()):
                    if id(raw) not in self._in_hand:
                        continue
                    try:
                        await self.extend(raw)
                    except Exception as error:
                        _log.warning(NOT_EXTENDED, self.queue_of(raw), error)
        finally:
            self._extending = None

    # -- for ``run``

    def _goes_on(self) -> bool:
        """True, unless the task was cancelled. The condition of every loop of ``run``.

        A client library may swallow a cancellation: ``asyncio.wait_for`` of Python 3.11 does, if the result comes at
        the same moment. The loop would then never end.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return True

    async def _free(self) -> int:
        """How many messages may be taken, when there is room for one."""
        while len(self._tasks) >= self.concurrency:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return self.concurrency - len(self._tasks)

    async def _spawn(self, raw: Raw) -> asyncio.Task[Outcome]:
        """Handle one delivery in a task of its own, when fewer than ``concurrency`` are running."""
        await self._free()
        task = asyncio.create_task(self.on_message(raw))
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._waiting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "a delivery ended without an answer to the broker, which will deliver the message again", exc_info=error
            )

    async def _drain(self) -> None:
        """Let the running handlers end, and answer the broker."""
        self._stopping.set()
        until = asyncio.get_running_loop().time() + self.once.grace
        while (running := self._tasks | self._waiting) and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(running, timeout=left)
        for task in (cut_off := self._tasks | self._waiting):
            task.cancel()
        if cut_off:
            await asyncio.wait(cut_off)
        if self._extending is not None:
            self._extending.cancel()
        self._stopping.clear()

    def _later(self, seconds: float, answer: Callable[[], Awaitable[object]]) -> None:
        """Answer the broker after a while, or when ``run`` ends. Meanwhile other messages are handled."""

        async def wait_and_answer() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
            await answer()

        task = asyncio.create_task(wait_and_answer())
        self._waiting.add(task)
        task.add_done_callback(self._over)


Handler = Callable[[Raw], Awaitable[Any] | Any]
