"""What every adapter has in common: take a delivery, let :class:`Message` decide and run, and answer the broker.

An adapter is a subclass of ``AsyncConsumer`` (``event_loop.py``) or of ``BlockingConsumer`` (``blocking.py``) for one
client library. It reads an id and a body from the library's message, and has verbs for the broker: acknowledge, deliver
again later, copy elsewhere, extend. ``table.py`` says which of them follows.

If the store does not answer, or another delivery of the message is being handled, an adapter with ``holds`` keeps the
message, unacknowledged, and asks the store again itself (``table.HELD``).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from oncekey.consumers.message import Message, Queue, check_settings, id_text
from oncekey.consumers.table import Action, OnUnknown, Outcome, Situation
from oncekey.core.policy import Policy
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

_log = logging.getLogger("oncekey")

Raw = TypeVar("Raw")

ID_HEADER = "oncekey-message-id"
"""On a copy in the parking place or the dead letters: the id under which the message is known. If the copy is moved
back to its queue, this id counts, so that it is the same message."""
REASON_HEADER = "oncekey-reason"
"""On such a copy: the situation, and a sentence."""
QUEUE_HEADER = "oncekey-queue"
"""On such a copy: the queue from which it came."""

COPY_FAILED: Final = (
    "%s could not be copied to %s, so it is not acknowledged, %s: does that place exist, and may this consumer write "
    "to it?"
)
ANSWERED: Final = (
    "the handler of %s answered the broker itself, before the outcome was stored: a crash between the two would lose "
    "the message. Leave the answer to the consumer"
)
NOT_EXTENDED: Final = (
    "the broker was not told that a message of %s is still being handled (%s). It may deliver the message again "
    "meanwhile, which counts as a delivery; the message does not run twice"
)
_NO_STORE: Final = (
    "the store does not answer. The consumer of %s keeps the messages that it has, takes no more than its concurrency, "
    "and asks the store again until it answers. Of the first of these messages: %s"
)
_STORE_IS_BACK: Final = "the store answers again: the consumer of %s goes on"
_COPIED: Final = "%s goes to %s: %s%s"
_MOVE_BACK: Final = {
    Situation.UNKNOWN: ". When its key is settled, move the copy back (docs/consumers.md, Moving copies back)",
}
_WITHOUT_STORE: Final = frozenset({Situation.NO_STORE, Situation.NOT_STORED})


def is_text(given: object) -> bool:
    return isinstance(given, str) and given != ""


class Consumer(ABC, Generic[Raw]):
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
    holds = True
    """Whether the adapter keeps messages of the situations in ``table.HELD``. False for a broker that counts no
    deliveries and whose client must be polled meanwhile."""
    extends = False
    """Whether the broker delivers a message again after a time without an answer, and the adapter extends that."""

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
            if not is_text(place) and not (setting == "parking" and place is None):
                raise ConfigurationError(f"{name}({setting}=…): it takes the name of the place to which copies go")
        if scope is None and once.single_tenant is None:
            raise ConfigurationError(
                f"{name}(scope=…): say whose messages these are, because OnceKey(scope=…) is a function of a request: "
                "a tenant's name, or a function of the message that returns it"
            )
        if scope is not None and not callable(scope) and not is_text(scope):
            raise ConfigurationError(
                f"{name}(scope=…): it takes a tenant's name, or a function of the message that returns it"
            )
        check_settings(once, policy, unknown, max_attempts)  # now, and not at the first message
        self.once = once
        self.handler = handler
        self.places = {Action.DEAD_LETTER: dead_letter, Action.PARK: parking or dead_letter}
        self._message_id = message_id
        self._scope = scope
        self._settings = (policy, unknown, max_attempts)
        self._queues: dict[str, Queue] = {}
        self._without_store = False

    # -- what an adapter reads from its library's message

    @abstractmethod
    def queue_of(self, raw: Raw) -> str:
        """The name of the queue; for a broker that has consumer groups, with the name of the group."""

    @abstractmethod
    def id_of(self, raw: Raw) -> object:
        """The id that the producer gave the message; None: it gave none."""

    @abstractmethod
    def body_of(self, raw: Raw) -> bytes: ...

    @abstractmethod
    def header_of(self, raw: Raw, name: str) -> str | None:
        """A header, attribute or field of the message, as text."""

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

    def _held(self, message: Message, outcome: Outcome) -> None:
        """Log the beginning and the end of an outage of the store, once each."""
        without_store = outcome.situation in _WITHOUT_STORE
        if without_store is not self._without_store:
            self._without_store = without_store
            if without_store:
                _log.warning(_NO_STORE, message.queue.name, outcome.reason)
            else:
                _log.warning(_STORE_IS_BACK, message.queue.name)

    def _ended(self, message: Message, outcome: Outcome, error: BaseException | None) -> None:
        """Log what an operator or a developer must see."""
        if outcome.situation not in _WITHOUT_STORE:
            self._held(message, outcome)
        if outcome.situation is Situation.BAD_ID:
            _log.error("a message of %s was not run: %s. %s", message.queue.name, outcome.reason, self.id_hint)
        elif outcome.action in self.places:
            place, command = self.places[outcome.action], message.show_command
            then = _MOVE_BACK.get(outcome.situation, "")
            if command is not None and outcome.situation is not Situation.REFUSED:
                then += f". Look at it: `{command}`"
            _log.error(_COPIED, message.name, place, outcome.reason, then, exc_info=error)
        elif error is not None:
            again = (
                f"it will be delivered again in {outcome.delay:g} s" if outcome.action is Action.RETRY else "it ended"
            )
            _log.warning("the handler of %s raised, and %s: %s", message.name, again, outcome.reason, exc_info=error)

    def _headers(self, raw: Raw, outcome: Outcome) -> dict[str, str]:
        """What a copy carries besides the message's own headers."""
        headers = {REASON_HEADER: f"{outcome.situation}: {outcome.reason}", QUEUE_HEADER: self.queue_of(raw)}
        known_as = id_text(self._id(raw))
        return headers if known_as is None else {ID_HEADER: known_as, **headers}
