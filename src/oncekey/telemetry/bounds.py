"""Bounds for the values of labels: a metric must not get a series for every path or tenant that a client can invent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from oncekey.core.policy import Policy
from oncekey.core.routes import Routes, plain
from oncekey.errors import ConfigurationError

_ANY = Policy()
OTHER = "other"
"""The label of everything that has no series of its own."""
LONGEST = 200
"""How many characters of a name are shown."""
WINDOW_SECONDS = 300.0
CANDIDATES = 4
"""How many tenants without a series are counted, for each that has one."""


REMEMBERED = 1_000
"""How many names are remembered with their label. Clients choose paths, so it needs a limit."""


class FirstSeen:
    """The first ``limit`` values keep their name, as far as it is readable and short. All later ones are ``other``.

    If :meth:`know` was told the routes of the app, a request has the label of its route, and one that no route matches
    is ``other``: a scanner that asks for paths at random fills no series.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._labels: set[str] = set()
        self._remembered: dict[str, str] = {}
        self._patterns: dict[str, Policy | None] = {}
        self._routes: Routes | None = None

    def know(self, operations: Iterable[str]) -> None:
        """All routes of an app, each with the pattern of its path: ``POST /orders/{id}``."""
        for operation in operations:
            with suppress(ConfigurationError):  # a pattern of a framework that oncekey does not read
                Routes(_ANY, {operation: _ANY})
                self._patterns[operation] = _ANY
        if self._patterns:
            self._routes = Routes(_ANY, self._patterns)

    def label(self, text: str) -> str:
        known = self._remembered.get(text)
        if known is not None:
            return known
        shown = self._named(text)
        if shown not in self._labels:
            if shown == OTHER or len(self._labels) >= self._limit:
                return OTHER
            self._labels.add(shown)
        if len(self._remembered) < REMEMBERED:
            self._remembered[text] = shown
        return shown

    def route_of(self, text: str) -> str | None:
        """The route that a request matches, None if it matches none; the text itself if the routes are not known, or if
        it is not the name of a request."""
        method, _, path = text.partition(" ")
        if self._routes is None or not path.startswith("/"):
            return text
        pattern = self._routes.listed_as(method, path)
        return None if pattern is None else plain(pattern)

    def _named(self, text: str) -> str:
        route = self.route_of(text)
        if route is None:
            return OTHER
        # A path may have bytes that are not UTF-8, as lone surrogates. The whole page could not be sent with one.
        return route.encode("utf-8", "replace").decode()[:LONGEST]


class Busiest:
    """The busiest ``limit`` tenants have a series each; all others share ``other``.

    The first tenants take the free places. After that, a tenant takes the place of the least busy one if it was twice
    as busy in a window of five minutes. ``freed`` is called with the tenant that lost its place, so that its series is
    dropped. ``fixed``: no place changes its tenant, for series that cannot be dropped.

    Its memory is bounded: candidates are counted by the Space-Saving algorithm, which overestimates rare ones.
    """

    def __init__(
        self,
        limit: int,
        freed: Callable[[str], None],
        *,
        fixed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._freed = freed
        self._fixed = fixed
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[str, int] = {}
        self._candidates: dict[str, int] = {}
        self._window_ends = clock() + WINDOW_SECONDS

    def label(self, tenant: str) -> str:
        """Count one event of this tenant, and return its label."""
        with self._lock:
            if tenant in self._places:
                self._places[tenant] += 1
                return tenant
            if len(self._places) < self._limit:
                self._places[tenant] = 1
                return tenant
            if not self._fixed:
                self._count(tenant)
                if self._clock() >= self._window_ends:
                    self._end_window()
                    if tenant in self._places:
                        return tenant
        return OTHER

    def _count(self, tenant: str) -> None:
        counts = self._candidates
        if tenant in counts or len(counts) < CANDIDATES * self._limit:
            counts[tenant] = counts.get(tenant, 0) + 1
            return
        rarest = min(counts, key=counts.__getitem__)
        counts[tenant] = counts.pop(rarest) + 1

    def _end_window(self) -> None:
        ranked = sorted(self._candidates, key=self._candidates.__getitem__, reverse=True)
        for tenant in ranked[: self._limit]:
            idlest = min(self._places, key=self._places.__getitem__)
            if self._candidates[tenant] <= 2 * self._places[idlest]:
                break
            del self._places[idlest]
            self._freed(idlest)
            self._places[tenant] = self._candidates[tenant]
        self._places = dict.fromkeys(self._places, 0)
        self._candidates = {}
        self._window_ends = self._clock() + WINDOW_SECONDS
