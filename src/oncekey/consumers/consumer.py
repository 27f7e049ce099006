"""What every adapter has in common: take a delivery, let :class:`Message` decide and run, and answer the broker.

An adapter is a subclass of :class:`AsyncConsumer` or of ``BlockingConsumer`` (``blocking.py``) for one client library.
It reads an id and a body from the library's message, and has three verbs for the broker: acknowledge, deliver again
later, copy elsewhere. ``table.py`` says which of them follows.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from oncekey.consumers.message import Message, Queue, id_text
from oncekey.consumers.table import LONG_SECONDS, Action, OnUnknown, Outcome, Situation
from oncekey.core.policy import Policy
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, MessageNotRun

_log = logging.getLogger("oncekey")

Raw = TypeVar("Raw")

ID_HEADER = "oncekey-message-id"
"""On a copy in the parking place or the dead letters: the id under which the message is known. If the copy is moved
back to its queue, this id counts, so that it is the same message."""
REASON_HEADER = "oncekey-reason"
"""On such a copy: the situation, and a sentence."""
QUEUE_HEADER = "oncekey-queue"
"""On such a copy: the queue from which it came."""

COPY_FAILED = (
    "a message of %s could not be copied to %s, so it is not acknowledged and will be delivered again: does that place "
    "exist, and may this consumer write to it?"
)
_ANSWERED = (
    "the handler of %s answered the broker itself, before the outcome was stored: a crash between the two would lose "
    "the message. Leave the answer to the consumer"
)


class Consumer(Generic[Raw]):
    """The settings of an adapter. ``run`` consumes until it is stopped; ``on_message`` takes one delivery.

    ``handler``      gets the client library's own message; ``oncekey.current()`` is its operation
    ``dead_letter``  where messages are copied that must not run: the name of a queue, topic, stream or subject
    ``parking``      where messages are copied whose outcome is unknown; the dead letters, unless you name another place
    ``message_id``   a function of the message that returns its id. It must be the same at every delivery
    ``scope``        the tenant to which the message belongs, or a function of the message; not with SINGLE_TENANT
    ``policy``       as of a route. Without it, the app's policy, and keys are kept for 14 days
    ``unknown``      ``"park"`` (default) or ``"keep"``: the broker delivers it again until its key is settled
    ``max_attempts`` after how many failed attempts a message is a dead letter. None: it is tried without end
    """

    id_hint = "pass message_id=…, a function of the message"
    """What to set if a message has no id. Every adapter says it in the words of its broker."""

    def __init__(
        self,
        once: OnceKey,
        handler: Callable[[Raw], Any],
        *,
        dead_letter: str,
        parking: str | None = None,
        message_id: Callable[[Raw], object] | None = None,
        scope: str | Callable[[Raw], str] | None = None,
        policy: Policy | None = None,
        unknown: OnUnknown = "park",
        max_attempts: int | None = 10,
    ) -> None:
        name = type(self).__name__
        if not isinstance(once, OnceKey):
            raise ConfigurationError(f"{name}(once, …): it takes a OnceKey")
        if not callable(handler):
            raise ConfigurationError(f"{name}(handler=…): it takes a function of the message")
        if message_id is not None and not callable(message_id):
            raise ConfigurationError(f"{name}(message_id=…): it takes a function of the message that returns its id")
        for setting, place in (("dead_letter", dead_letter), ("parking", parking)):
            if not (isinstance(place, str) and place) and not (setting == "parking" and place is None):
                raise ConfigurationError(f"{name}({setting}=…): it takes the name of the place to which copies go")
        if scope is None and once.single_tenant is None:
            raise ConfigurationError(
                f"{name}(scope=…): say whose messages these are, because OnceKey(scope=…) is a function of a request: "
                "a tenant's name, or a function of the message that returns it"
            )
        self.once = once
        self.handler = handler
        self.places = {Action.DEAD_LETTER: dead_letter, Action.PARK: parking or dead_letter}
        self._message_id = message_id
        self._scope = scope
        self._settings = (policy, unknown, max_attempts)
        self._queues: dict[str, Queue] = {}

    # -- what an adapter reads from its library's message

    def queue_of(self, raw: Raw) -> str:
        """The name of the queue; for a broker that has consumer groups, with the name of the group."""
        raise NotImplementedError

    def id_of(self, raw: Raw) -> object:
        """The id that the producer gave the message; None: it gave none."""
        raise NotImplementedError

    def body_of(self, raw: Raw) -> bytes:
        raise NotImplementedError

    def header_of(self, raw: Raw, name: str) -> str | None:
        """A header, attribute or field of the message, as text."""
        raise NotImplementedError

    def content_type_of(self, raw: Raw) -> str | None:
        del raw
        return None

    # -- one delivery

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            policy, unknown, max_attempts = self._settings
            self._queues[name] = Queue(self.once, name, policy=policy, unknown=unknown, max_attempts=max_attempts)
        return self._queues[name]

    def _message(self, raw: Raw) -> Message:
        queue = self._queue(self.queue_of(raw))
        scope = self._scope(raw) if callable(self._scope) else self._scope
        body, content_type = self.body_of(raw), self.content_type_of(raw)
        return queue.message(self._id(raw), body, scope=scope, content_type=content_type)

    def _id(self, raw: Raw) -> object:
        if carried := self.header_of(raw, ID_HEADER):
            return carried
        if self._message_id is None:
            return self.id_of(raw)
        try:
            return self._message_id(raw)
        except Exception:  # the function of the app does not know such a message
            _log.exception("message_id=%s raised, so the message has no id", getattr(self._message_id, "__name__", "…"))
            return None

    def _ended(self, raw: Raw, message: Message, error: Exception | None) -> Outcome:
        """Log what an operator or a developer must see."""
        outcome, queue = message.outcome, self.queue_of(raw)
        assert outcome is not None  # noqa: S101 - a message that ended has one
        if outcome.situation is Situation.BAD_ID:
            _log.error("a message of %s was not run: %s. %s", queue, outcome.reason, self.id_hint)
        elif outcome.action in self.places:
            _log.error(
                "a message of %s goes to %s: %s", queue, self.places[outcome.action], outcome.reason, exc_info=error
            )
        elif error is not None:
            _log.warning(
                "a message of %s will be delivered again in %g s: %s",
                queue,
                outcome.delay,
                outcome.reason,
                exc_info=error,
            )
        return outcome

    def _headers(self, raw: Raw, outcome: Outcome) -> dict[str, str]:
        """What a copy carries besides the message's own headers."""
        headers = {REASON_HEADER: f"{outcome.situation}: {outcome.reason}", QUEUE_HEADER: self.queue_of(raw)}
        known_as = id_text(self._id(raw))
        return headers if known_as is None else {ID_HEADER: known_as, **headers}


class AsyncConsumer(Consumer[Raw]):
    """For client libraries of asyncio. A handler that is a plain function runs in a thread.

    ``concurrency``: how many messages are handled at the same time. If ``run`` is cancelled, it takes no more messages
    and gives the running handlers ``OnceKey(grace=…)`` seconds to end.
    """

    def __init__(self, *args: Any, concurrency: int = 10, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if concurrency < 1:
            raise ConfigurationError(f"{type(self).__name__}(concurrency={concurrency}): it takes 1 or more")
        self.concurrency = concurrency
        self._is_async = inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(
            getattr(self.handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    # -- the adapter's verbs

    async def ack(self, raw: Raw) -> None:
        raise NotImplementedError

    async def retry(self, raw: Raw, delay: float) -> None:
        """Let the broker deliver it again, after ``delay`` seconds if the broker can do that."""
        raise NotImplementedError

    async def copy(self, raw: Raw, place: str, headers: dict[str, str]) -> None:
        """Return when the broker has stored the copy."""
        raise NotImplementedError

    def is_answered(self, raw: Raw) -> bool:
        """Whether the handler answered the broker itself, as far as the library knows."""
        del raw
        return False

    # --

    async def on_message(self, raw: Raw) -> Outcome:
        """Handle one delivery and answer the broker. For a loop of your own; ``run`` calls it, too."""
        try:
            outcome = await self._deliver(raw)
        except Exception:
            await self.retry(raw, LONG_SECONDS)
            raise
        if self.is_answered(raw):
            _log.error(_ANSWERED, self.queue_of(raw))
            return outcome
        if outcome.action is Action.ACK:
            await self.ack(raw)
        elif outcome.action is Action.RETRY:
            await self.retry(raw, outcome.delay)
        else:
            place = self.places[outcome.action]
            try:
                await self.copy(raw, place, self._headers(raw, outcome))
            except Exception:
                _log.exception(COPY_FAILED, self.queue_of(raw), place)
                await self.retry(raw, LONG_SECONDS)
            else:
                await self.ack(raw)
        return outcome

    async def _deliver(self, raw: Raw) -> Outcome:
        message = self._message(raw)
        raised: Exception | None = None
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
        except Exception as error:
            if message.outcome is None:  # a setting is wrong, so the message was not even looked up
                raise
            raised = error
        return self._ended(raw, message, raised)

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

    async def _spawn(self, raw: Raw) -> asyncio.Task[Outcome]:
        """Handle one delivery in a task of its own, when fewer than ``concurrency`` are running."""
        while len(self._tasks) >= self.concurrency:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
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
