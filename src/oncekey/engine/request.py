"""The request as the app's scope function sees it, whatever the framework."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from oncekey.errors import ConfigurationError

_T = TypeVar("_T")


class Headers(Mapping[str, str]):
    """The headers of a request. A name is found in any case; iterating gives names in lower case.

    Several lines of one header are one value, joined by commas. Only the names are in its ``repr``: values are secrets.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str]) -> None:
        """``values``: by lower-case name."""
        self._values = values

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Headers({', '.join(self._values)})"


class Request:
    """``method``, ``path``, ``headers`` (names in any case), and ``raw``: the ASGI scope or the WSGI environ."""

    __slots__ = ("_headers", "_read_headers", "method", "path", "raw")

    def __init__(
        self, method: str, path: str, raw: Mapping[str, Any], read_headers: Callable[[], dict[str, str]]
    ) -> None:
        self.method = method
        self.path = path
        self.raw = raw
        self._read_headers = read_headers
        self._headers: Headers | None = None

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = Headers(self._read_headers())
        return self._headers


class SingleTenant:
    """All keys belong to one owner. Say it on purpose: a replay goes to whoever sends the key."""

    def __repr__(self) -> str:
        return "SINGLE_TENANT"


SINGLE_TENANT: Final = SingleTenant()

ScopeFunction = Callable[[Request], str | Awaitable[str]]
AuthorizeFunction = Callable[[Request, str], object]
"""Gets the request and the name of the operation, sync or async; raises NotAuthorized, or returns None."""


def allowed(answer: object) -> None:
    """Check what an authorize function returned: its author may have meant False as a refusal."""
    if answer is not None:
        raise ConfigurationError(
            f"the authorize function returned {answer!r}: it must raise NotAuthorized to refuse, and return nothing"
        )


def not_async(answer: _T | Awaitable[_T], which: str) -> _T:
    """What a function of the app returned to a WSGI app, which has no event loop to await it in."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise ConfigurationError(f"the {which} function is async, and this is a WSGI app: make it a plain function")
    return answer
