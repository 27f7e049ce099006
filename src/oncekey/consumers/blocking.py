"""The consumer for client libraries that block; ``consumer.py`` has the settings, and ``event_loop.py`` the twin."""

from __future__ import annotations

import inspect
import logging
import threading
from abc import abstractmethod
from typing import Any

from oncekey.consumers import signals
from oncekey.consumers.consumer import COPY_FAILED, NOT_EXTENDED, Consumer, Raw
from oncekey.consumers.message import Message
from oncekey.consumers.table import LONG_SECONDS, Action, Hold, Outcome
from oncekey.errors import ConfigurationError, MessageNotRun

_log = logging.getLogger("oncekey")


class BlockingConsumer(Consumer[Raw]):
    """For client libraries that block. ``stop`` ends ``run`` after the message in hand, and so does SIGTERM or SIGINT
    if the main thread runs it (``signals.py``)."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if inspect.iscoroutinefunction(self.handler):
            raise ConfigurationError(
                f"{type(self).__name__}(handler=…): this client library blocks, so it takes a plain function"
            )
        self._stopping = threading.Event()
        self._in_hand: dict[int, Raw] = {}
        self._lock = threading.Lock()
        self._extending = False

    def consume(self) -> None:
        """Take messages and call ``on_message``, until ``_stopping`` is set. ``run`` calls it."""
        raise NotImplementedError

    @abstractmethod
    def ack(self, raw: Raw) -> None:
        """It is done with: the broker forgets it."""

    @abstractmethod
    def retry(self, raw: Raw, delay: float) -> None:
        """Let the broker deliver it again, after ``delay`` seconds if the broker can do that."""

    @abstractmethod
    def copy(self, raw: Raw, place: str, headers: dict[str, str]) -> None:
        """Return when the broker has stored the copy."""

    def extend_every(self) -> float:
        """With ``extends``: how many seconds there are between two calls of :meth:`extend`."""
        raise NotImplementedError

    def extend(self, raw: Raw) -> None:
        """With ``extends``: tell the broker that the message is still in hand."""

    def run(self) -> None:
        """Consume until :meth:`stop`."""
        with signals.stopping(self.stop):
            self.consume()

    def stop(self) -> None:
        """End ``run``, from another thread or a signal handler."""
        self._stopping.set()

    def on_message(self, raw: Raw) -> Outcome:
        """Handle one delivery and answer the broker. For a loop of your own; ``run`` calls it, too.

        While the store does not answer, or another delivery of the message is being handled, this keeps the message.
        """
        self._take(raw)
        try:
            message, outcome, error = self._kept(raw)
            self._ended(message, outcome, error)
            if outcome.action is Action.ACK:
                self._acknowledge(raw)
            elif outcome.action is Action.RETRY:
                self._give_back(raw, outcome.delay)
            else:
                self._move(raw, message, outcome)
        except Exception:
            if id(raw) in self._in_hand:  # a setting is wrong, so the message was not even looked up
                self._give_back(raw, LONG_SECONDS)
            raise
        finally:
            self._in_hand.pop(id(raw), None)
        return outcome

    def _move(self, raw: Raw, message: Message, outcome: Outcome) -> None:
        """Copy the message to the dead letters or the parking place, and acknowledge it."""
        place = self.places[outcome.action]
        try:
            self.copy(raw, place, self._headers(raw, outcome))
        except Exception:
            _log.exception(COPY_FAILED, message.name, place, "and will be delivered again")
            self._give_back(raw, LONG_SECONDS)
        else:
            self._acknowledge(raw)

    def _acknowledge(self, raw: Raw) -> None:
        del self._in_hand[id(raw)]
        self.ack(raw)

    def _give_back(self, raw: Raw, delay: float) -> None:
        del self._in_hand[id(raw)]
        self.retry(raw, delay)

    def _kept(self, raw: Raw) -> tuple[Message, Outcome, BaseException | None]:
        """Run the message, or keep it until its outcome is known."""
        hold = Hold()
        while True:
            message, error = self._deliver(raw)
            outcome = message.outcome
            assert outcome is not None  # noqa: S101 - a message that ended has one
            pause = hold.pause(outcome) if self.holds and not self._stopping.is_set() else None
            if pause is None:
                return message, outcome, error
            self._held(message, outcome)
            self._stopping.wait(pause)

    def _deliver(self, raw: Raw) -> tuple[Message, BaseException | None]:
        message = self._message(raw)
        try:
            with message:
                self.handler(raw)
        except MessageNotRun:
            pass
        except BaseException as error:
            if message.outcome is None or not self._is_failure(error):
                raise
            return message, error
        return message, None

    def _is_failure(self, error: BaseException) -> bool:
        """Whether the handler failed with this. Otherwise this process is to end."""
        if isinstance(error, KeyboardInterrupt):
            return not (self._stopping.is_set() or signals.may_be_a_signal(error))
        return isinstance(error, Exception | SystemExit)

    # -- the broker's time for an answer

    def _take(self, raw: Raw) -> None:
        self._in_hand[id(raw)] = raw
        if not self.extends:
            return
        with self._lock:
            if not self._extending:
                self._extending = True
                threading.Thread(target=self._extend_all, name="oncekey-extender", daemon=True).start()

    def _extend_all(self) -> None:
        """Extend the messages in hand, until there are none."""
        every, idle = self.extend_every(), threading.Event()
        while True:
            with self._lock:
                if not self._in_hand:
                    self._extending = False
                    return
            idle.wait(every)
            for raw in list(self._in_hand.values()):
                if id(raw) not in self._in_hand:
                    continue
                try:
                    self.extend(raw)
                except Exception as error:
                    _log.warning(NOT_EXTENDED, self.queue_of(raw), error)
