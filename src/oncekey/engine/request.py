"""The request as the app's scope function sees it, whatever the framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final


class Request:
    """``method``, ``path``, ``headers`` (lower-case names), and ``raw``: the ASGI scope or the WSGI environ."""

    __slots__ = ("_headers", "_read_headers", "method", "path", "raw")

    def __init__(
        self, method: str, path: str, raw: Mapping[str, Any], read_headers: Callable[[], dict[str, str]]
    ) -> None:
        self.method = method
        self.path = path
        self.raw = raw
        self._read_headers = read_headers
        self._headers: dict[str, str] | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self._headers is None:
            self._headers = self._read_headers()
        return self._headers


class SingleTenant:
    """All keys belong to one owner. Say it on purpose: a replay goes to whoever sends the key."""

    def __repr__(self) -> str:
        return "SINGLE_TENANT"


SINGLE_TENANT: Final = SingleTenant()

ScopeFunction = Callable[[Request], str | Awaitable[str]]
