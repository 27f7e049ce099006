"""Sends events to the logger ``oncekey`` and to the app's own hook.

On the hot path ask :meth:`Emitter.wants` first, so that an event without a reader is never built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields

from oncekey.telemetry.events import Event

LOGGER = logging.getLogger("oncekey")

Hook = Callable[[Event], None]
"""The app's own listener. It runs inside the request, so it must be quick: do slow work elsewhere."""


def log_event(event: Event, error: BaseException | None = None) -> None:
    """Log one line on the logger ``oncekey``, at the event's level, with the event itself as ``event``.

    ``error``: what the app's own code raised; its traceback follows the line.
    """
    if not LOGGER.isEnabledFor(event.level):
        return
    shown = " ".join(f"{item.name}={_shown(getattr(event, item.name))}" for item in fields(event))
    LOGGER.log(event.level, "%s %s", type(event).__name__, shown, exc_info=error, extra={"event": event})


def _shown(value: object) -> str:
    """The value, quoted and escaped unless it is one plain word: a client's path must not forge log lines."""
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(" \"'=") else repr(text)


class Emitter:
    """Sends events to the log and to one hook. A hook that raises cannot break a request."""

    __slots__ = ("_complained", "_hook")

    def __init__(self, hook: Hook | None = None) -> None:
        self._hook = hook
        self._complained = False

    def wants(self, event_type: type[Event]) -> bool:
        """Whether the log or the hook takes such an event. Cheap: loggers cache the answer."""
        return self._hook is not None or LOGGER.isEnabledFor(event_type.level)

    def emit(self, event: Event, *, error: BaseException | None = None) -> None:
        log_event(event, error)
        if self._hook is None:
            return
        try:
            self._hook(event)
        except Exception:
            if not self._complained:  # once: a broken hook fails at every request
                self._complained = True
                LOGGER.exception(
                    "the on_event hook failed on %s; its later failures are not logged", type(event).__name__
                )
