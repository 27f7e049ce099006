"""SIGTERM and SIGINT stop the running consumers: they take no more messages and let the handlers end.

Without this, a process that gets SIGTERM ends at once, and the messages in hand with ``effects="external"`` become
unknown. A signal for which the app or its server has a handler is left to that handler. After the first signal the
previous handlers are back, so a second signal ends the process at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_DEFAULTS: Final = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
_stops: dict[int, Callable[[], None]] = {}
_previous: dict[signal.Signals, Any] = {}


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first signal, if the process has a consumer in its main thread."""
    number = id(stop)
    _stops[number] = stop
    _install()
    try:
        yield
    finally:
        del _stops[number]
        if not _stops:
            _restore()


def may_be_a_signal(error: KeyboardInterrupt) -> bool:
    """Whether Python raised this because of SIGINT. Otherwise a library raised it."""
    del error
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _install() -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets signal handlers in the main thread only
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) is default:
            _previous[number] = signal.signal(number, _stop_all)


def _restore() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    while _previous:
        number, handler = _previous.popitem()
        if signal.getsignal(number) is _stop_all:  # otherwise the app has set its own meanwhile
            signal.signal(number, handler)


def _stop_all(number: int, frame: FrameType | None) -> None:
    del number, frame
    stops = list(_stops.values())
    _restore()
    for stop in stops:
        stop()
