"""The request as the app's scope function gets it, the same in every framework."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from oncekey.errors import ConfigurationError

_T = TypeVar("_T")


class Headers(Mapping[str, str]):
    """The headers of a request. A name is found in any case; iterating gives names in lower case.

    Several lines of one header are one value, joined by commas. Its ``repr`` has only the names: values are secrets.
    A look-up reads line by line: most scope functions ask for one header, and a dictionary of all would cost more.
    """

    __slots__ = ("_lines",)

    def __init__(self, lines: Sequence[tuple[bytes, bytes]]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> str:
        wanted = name.lower().encode("latin-1", "replace")
        found = [value for line, value in self._lines if line == wanted]
        if not found:  # ASGI's names are in lower case; a test client's need not be
            found = [value for line, value in self._lines if line.lower() == wanted]
        if not found:
            raise KeyError(name)
        return b", ".join(found).decode("latin-1")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> dict[str, None]:
        return dict.fromkeys(name.decode("latin-1").lower() for name, _ in self._lines)

    def __repr__(self) -> str:
        return f"Headers({', '.join(self._names())})"


class Request:
    """``method``, ``path``, ``headers`` (names in any case), and ``raw``: the ASGI scope or the WSGI environ."""

    __slots__ = ("headers", "method", "path", "raw")

    def __init__(self, method: str, path: str, raw: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.path = path
        self.raw = raw
        self.headers = Headers(headers)


class SingleTenant:
    """All keys belong to one tenant. The app must choose it: a replay goes to every client that sends the key."""

    def __repr__(self) -> str:
        return "SINGLE_TENANT"


SINGLE_TENANT: Final = SingleTenant()

ScopeFunction = Callable[[Request], str | Awaitable[str]]
AuthorizeFunction = Callable[[Request, str], object]
"""A function, sync or async, of the request and the operation's name. It raises NotAuthorized or returns None."""


def allowed(answer: object) -> None:
    """Check what an authorize function returned: its author may have meant False as a refusal."""
    if answer is not None:
        raise ConfigurationError(
            f"the authorize function returned {answer!r}: it must raise NotAuthorized to refuse, and return nothing"
        )


def not_async(answer: _T | Awaitable[_T], which: str) -> _T:
    """Return the answer of the app's function. Refuse an awaitable: a WSGI app has no event loop to await it in."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise ConfigurationError(f"the {which} function is async, and this is a WSGI app: make it a plain function")
    return answer
