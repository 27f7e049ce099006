"""The consumer for client libraries that block; ``consumer.py`` has the settings, and the twin for asyncio."""

from __future__ import annotations

import inspect
import logging
import threading
from typing import Any

from oncekey.consumers.consumer import COPY_FAILED, Consumer, Raw
from oncekey.consumers.table import LONG_SECONDS, Action, Outcome
from oncekey.errors import ConfigurationError, MessageNotRun

_log = logging.getLogger("oncekey")


class BlockingConsumer(Consumer[Raw]):
    """For client libraries that block. ``stop`` ends ``run`` after the message in hand."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if inspect.iscoroutinefunction(self.handler):
            raise ConfigurationError(
                f"{type(self).__name__}(handler=…): this client library blocks, so it takes a plain function"
            )
        self._stopping = threading.Event()

    def ack(self, raw: Raw) -> None:
        raise NotImplementedError

    def retry(self, raw: Raw, delay: float) -> None:
        raise NotImplementedError

    def copy(self, raw: Raw, place: str, headers: dict[str, str]) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End ``run``, from another thread or a signal handler."""
        self._stopping.set()

    def on_message(self, raw: Raw) -> Outcome:
        """Handle one delivery and answer the broker. For a loop of your own; ``run`` calls it, too."""
        try:
            outcome = self._deliver(raw)
        except Exception:
            self.retry(raw, LONG_SECONDS)
            raise
        if outcome.action is Action.ACK:
            self.ack(raw)
        elif outcome.action is Action.RETRY:
            self.retry(raw, outcome.delay)
        else:
            place = self.places[outcome.action]
            try:
                self.copy(raw, place, self._headers(raw, outcome))
            except Exception:
                _log.exception(COPY_FAILED, self.queue_of(raw), place)
                self.retry(raw, LONG_SECONDS)
            else:
                self.ack(raw)
        return outcome

    def _deliver(self, raw: Raw) -> Outcome:
        message = self._message(raw)
        raised: Exception | None = None
        try:
            with message:
                self.handler(raw)
        except MessageNotRun:
            pass
        except Exception as error:
            if message.outcome is None:  # a setting is wrong, so the message was not even looked up
                raise
            raised = error
        return self._ended(raw, message, raised)
