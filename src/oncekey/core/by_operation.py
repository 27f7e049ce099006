"""Functions of the app by operation: resolvers, and functions that resume a half-done request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from oncekey.core.routes import MAX_NAME_LENGTH, METHOD_AND_PATH, compiled
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
