"""Finds the policy of a request. Pure: patterns in, a Route or None out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from urllib.parse import quote

from oncekey.core.policy import Policy
from oncekey.core.values import value
from oncekey.errors import ConfigurationError

MAX_NAME_LENGTH = 200
"""The longest path in the name of an operation; a longer one is cut and ends in a hash."""
REMEMBERED = 1_000
"""How many (method, path) pairs the cache holds. Clients choose both, so the cache needs a limit."""

_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_BREAK = "\n"
METHOD_AND_PATH = re.compile(r"([A-Za-z]+) (/\S*)")


@value
class Route:
    """``operation`` names the route in records, metrics and messages: ``POST /payments/{id}/refund``."""

    operation: str
    policy: Policy


_Listed = tuple[str, Route | None]
_UNSEEN = Route("", Policy())


class Routes:
    """The app's policy, and the routes that differ from it.

    ``{"POST /payments/{id}": Policy(...), "POST /login": None}``: a name in braces matches one segment of a path,
    ``{name:path}`` any number (other converters, as in ``{id:int}``, match one). None exempts a route. A listed route
    is protected, also if the app's policy does not protect its method.
    """

    def __init__(
        self, policy: Policy, routes: Mapping[str, Policy | None] | None = None, *, only_listed: bool = False
    ) -> None:
        self._policy = policy
        self._only_listed = only_listed
        self._alone: Routes | None = None
        self.listed: dict[str, Policy | None] = {}
        """The routes that differ from the app's policy, by operation."""
        self._exact: dict[tuple[str, str], _Listed] = {}
        self._patterns: list[tuple[str, re.Pattern[str], _Listed]] = []
        self._remembered: dict[tuple[str, str], Route | None] = {}
        if routes is not None and not isinstance(routes, Mapping):
            raise ConfigurationError(
                "routes: it takes a mapping, such as {'POST /payments': Policy(), 'POST /login': None}"
            )
        for text, own in (routes or {}).items():
            if own is not None and not isinstance(own, Policy):
                raise ConfigurationError(f"routes: {text!r} takes a Policy, or None, which exempts it")
            split = METHOD_AND_PATH.fullmatch(text)
            if split is None:
                raise ConfigurationError(f"routes: {text!r} is not of the form 'POST /path'")
            method, path = split[1].upper(), split[2]
            operation = f"{method} {path}"
            self.listed[operation] = own
            listed = (operation, None if own is None else Route(operation, own))
            if "{" in path:
                self._patterns.append((method, compiled(path, exempt=own is None), listed))
            else:
                self._exact[method, path] = listed

    def only_listed(self) -> Routes:
        """The same routes, for an app that protects only listed routes."""
        if self._alone is None:
            self._alone = Routes(self._policy, self.listed, only_listed=True)
        return self._alone

    def match(self, method: str, path: str) -> Route | None:
        """The route of a request, or None if oncekey does not touch it."""
        at = (method, path)
        route = self._remembered.get(at, _UNSEEN)
        if route is _UNSEEN:
            route = self._match(method, path)
            if len(self._remembered) < REMEMBERED and len(method) + len(path) <= MAX_NAME_LENGTH:
                self._remembered[at] = route
        return route

    def _match(self, method: str, path: str) -> Route | None:
        if (found := self._find(method, path)) is not None:
            return found[1]
        if method in self._policy.methods and not self._only_listed:
            return Route(f"{method} {_named(path)}", self._policy)
        return None

    def listed_as(self, method: str, path: str) -> str | None:
        """The name in ``listed`` of the route that a request matches; None: only the app's policy applies."""
        found = self._find(method, path)
        return None if found is None else found[0]

    def of_mounted(self, method: str, path: str, behind: str) -> str:
        """The path to match for a mounted app: the part after its mount if that is listed and protected, otherwise the
        whole path. An exemption applies only to the whole path."""
        if behind == path or self._find(method, path) is not None:
            return path
        found = self._find(method, behind)
        return path if found is None or found[1] is None else behind

    def _find(self, method: str, path: str) -> _Listed | None:
        exact = self._exact.get((method, path))
        found = exact or self._fitting(method, path)
        if exact is None and (found is None or found[1] is None):
            # A framework may treat several spellings of a path as one. A protected route also protects its other
            # spellings. An exemption applies only to the spelling in ``routes``, so that another spelling of a
            # protected path cannot match an exempt pattern.
            for other in _also_written(path):
                listed = self._exact.get((method, other)) or (None if found else self._fitting(method, other))
                if listed is not None and listed[1] is not None:
                    return listed
        return found

    def _fitting(self, method: str, path: str) -> _Listed | None:
        for of_method, pattern, listed in self._patterns:
            if of_method == method and pattern.fullmatch(path):
                return listed
        return None


def _also_written(path: str) -> Iterator[str]:
    """Other spellings of a path: with or without the slash at the end (Flask's ``strict_slashes=False``), without a
    line break at the end (Starlette's ``$``), with one slash in front instead of several (Werkzeug)."""
    plain = f"/{path.removesuffix(_BREAK).lstrip('/')}"
    if plain != path:
        yield plain
    if len(plain) > 1:
        yield plain.removesuffix("/") if plain.endswith("/") else f"{plain}/"


def _named(path: str) -> str:
    """A path as the name of an operation, which is safe in every store and in a log line.

    Paths come from clients: NUL, control characters, lone surrogates, kilobytes. Distinct paths have distinct names.
    """
    if len(path) <= MAX_NAME_LENGTH and path.isprintable():
        return path
    digest = sha256(path.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{quote(path[:MAX_NAME_LENGTH], errors='surrogatepass')[:MAX_NAME_LENGTH]}~{digest}"


def plain(path: str) -> str:
    """A framework's pattern without converters, for the name of an operation: ``/payments/{id:int}`` gives
    ``/payments/{id}``."""
    return _PARAMETER.sub(r"{\1}", path)


def compiled(path: str, *, exempt: bool = False) -> re.Pattern[str]:
    """The pattern of a path, for ``fullmatch``.

    ``{name:path}`` may be empty, as in Starlette, and may contain line breaks, as in Flask and Litestar. An exemption
    is narrower: there ``{name:path}`` needs at least one character, and no line break.
    """
    anything = ".+" if exempt else r"[\s\S]*"
    parts, end = [], 0
    for found in _PARAMETER.finditer(path):
        parts += [re.escape(path[end : found.start()]), anything if found[2] == "path" else "[^/]+"]
        end = found.end()
    if "{" in _PARAMETER.sub("", path) or "}" in _PARAMETER.sub("", path):
        raise ConfigurationError(f"routes: the braces in {path!r} are not of the form {{name}} or {{name:path}}")
    return re.compile("".join([*parts, re.escape(path[end:])]))
