"""What belongs to an operation, by its name: resolvers, functions that resume a half-done request, and words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from oncekey.core.routes import MAX_NAME_LENGTH, METHOD_AND_PATH, compiled
from oncekey.core.values import value
from oncekey.errors import ConfigurationError

_F = TypeVar("_F")
OF_MESSAGES = "message "
"""The operation of a queue's messages is this and the name of the queue."""


def is_name(operation: object) -> bool:
    """Whether it can be the operation of a protected function or a queue: no method, no path, no white space."""
    return (
        isinstance(operation, str)
        and 1 <= len(operation) <= MAX_NAME_LENGTH
        and operation.isprintable()
        and " " not in operation
        and not operation.startswith("/")
    )


@value
class Words:
    """What log lines call the parts of an operation: a route's, a function's or a queue's."""

    unit: str
    """What is declared."""
    work: str
    """What runs."""
    answer: str
    """What is stored of it."""
    again: str
    """What comes a second time."""
    told: str
    """What the caller gets if the answer is not stored."""
    view: str
    """What runs, in Django."""


_OF_ROUTES = Words("route", "handler", "response", "retries", "The client got 503", "view")
_OF_FUNCTIONS = Words("function", "function", "result", "repeated calls", "Its caller got StoreUnavailable", "function")
_OF_QUEUES = Words("queue", "handler", "outcome", "repeated deliveries", "The message will come again", "handler")


def words_for(operation: str) -> Words:
    if operation.startswith(OF_MESSAGES):
        return _OF_QUEUES
    return _OF_FUNCTIONS if is_name(operation) else _OF_ROUTES


def worded(text: str, operation: str) -> str:
    """The text with the words of this operation for ``{unit}``, ``{work}`` and the other fields of ``Words``."""
    words = words_for(operation)
    for name in ("unit", "work", "answer", "again", "told", "view"):
        text = text.replace(f"{{{name}}}", getattr(words, name))
    return text


def delivered_again(operation: str) -> str:
    """For a message whose key may run again: what must happen at the broker. Empty for a request or a function."""
    if not operation.startswith(OF_MESSAGES):
        return ""
    queue = operation.removeprefix(OF_MESSAGES)
    return (
        f"when the message is delivered again. A parked message was acknowledged, so the broker does not deliver it by "
        f"itself: move its copy back to {queue} (docs/consumers.md, Moving copies back)"
    )


class ByOperation(Generic[_F]):
    """One function for each operation: ``POST /payments``, a pattern as in routes, ``POST /payments/{id}``, the name of
    a protected function, ``charge``, or ``message payments``, the messages of a queue."""

    def __init__(self, what: str) -> None:
        self._what = what
        """The name of such a function in errors."""
        self._exact: dict[str, _F] = {}
        self._patterns: list[tuple[str, re.Pattern[str], _F]] = []

    def add(self, operation: str, function: _F) -> None:
        split = METHOD_AND_PATH.fullmatch(operation)
        if split is None and not is_name(operation.removeprefix(OF_MESSAGES)):
            raise ConfigurationError(
                f"{self._what}: {operation!r} is neither of the form 'POST /path', nor the name of a function, nor "
                "'message QUEUE'"
            )
        method, path = ("", "") if split is None else (split[1].upper(), split[2])
        name = operation if split is None else f"{method} {path}"
        if name in self._exact:
            raise ConfigurationError(f"{name} has a {self._what} already: one operation, one {self._what}")
        self._exact[name] = function
        if "{" in path:
            self._patterns.append((method, compiled(path), function))

    def of(self, operation: str) -> _F | None:
        """The function of a key's operation, which is its listed route, or otherwise the path itself."""
        if (found := self._exact.get(operation)) is not None:
            return found
        method, _, path = operation.partition(" ")
        return next((each for of, pattern, each in self._patterns if of == method and pattern.fullmatch(path)), None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._exact)

    def __bool__(self) -> bool:
        return bool(self._exact)
