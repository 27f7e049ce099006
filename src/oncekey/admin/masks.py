"""Finds the key of a masked key in a log line or in the ``reference`` of a 409 (``orde~36fd3064``, ``~fa23ec8c``).

The search is bounded. Letters before the ``~`` are a range of the primary key: only keys that begin with them are read.
If there are no letters, if the tenant is not given, or if very many keys begin with the letters, reading ends after
``LOOKED`` keys. Operators mostly ask for keys that are unknown or in flight. Their states have indexes, so they are
read first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

from oncekey.admin.doctor import span
from oncekey.core.record import ENDPOINT_MARK, Record
from oncekey.core.states import State
from oncekey.errors import KeyNotFound, OperatorError
from oncekey.stores.api import Store
from oncekey.telemetry.redaction import redact

LOOKED = 100_000
"""How many keys are read: first of each state in ``_FIRST``, then of all states."""
_PAGE = 10_000
_FIRST = (State.UNKNOWN, State.IN_PROGRESS, State.PENDING)
_LISTED = 20
_Found = dict[tuple[str, str], Record]
_MASK = re.compile(r"(.{4})?~[0-9a-f]{8}", re.DOTALL).fullmatch


def whole_key(store: Store, scope: str, given: str, *, reveal: bool = False) -> str:
    """The key of this scope with the mask ``given``; ``given`` itself if it is not a mask, or is a key that looks like
    a mask.

    KeyNotFound if no key of this scope has that mask, OperatorError if several have it.
    """
    if (mask := _is_mask(store, scope, given)) is None:
        return given
    search = _Search(store, given)
    search.scope(scope, mask[1] or "")
    return search.only(reveal)[1]


def find_key(
    store: Store, scope: str, given: str, *, everywhere: bool = False, reveal: bool = False
) -> tuple[str, str]:
    """Scope and key of a mask. If the scope itself has no such key, the endpoints of its tenant are searched.

    ``everywhere``: the tenant is not given, so all scopes are searched, and ``scope`` first. Raises as
    :func:`whole_key` does.
    """
    if (mask := _is_mask(store, scope, given)) is None:
        return scope, given
    search = _Search(store, given)
    search.scope(scope, mask[1] or "")
    if everywhere:
        search.all_scopes()
    elif not search.found and ENDPOINT_MARK not in scope:
        search.endpoints(scope)
    return search.only(reveal)


def _is_mask(store: Store, scope: str, given: str) -> re.Match[str] | None:
    mask = _MASK(given)
    return None if mask is None or store.read([(scope, given)])[0] is not None else mask


class _Search:
    """The keys with one mask, in the places where it was told to look."""

    def __init__(self, store: Store, given: str) -> None:
        self._store = store
        self._given = given
        self._cut = False
        """Whether a place has more keys than were read."""
        self._everywhere = False
        self.found: _Found = {}

    def scope(self, scope: str, start: str) -> None:
        """Keys of this scope that are longer than ``start`` and begin with it."""
        self._look(scope, (scope, start), lambda record: record.key.startswith(start))

    def endpoints(self, tenant: str) -> None:
        """Keys of this tenant that are per endpoint: their scopes are neighbours in the order of a listing."""
        first = f"{tenant}{ENDPOINT_MARK}"
        self._look(None, (first, ""), lambda record: record.scope.startswith(first))

    def all_scopes(self) -> None:
        self._everywhere = True
        self._look(None, None, lambda _: True)

    def _look(self, scope: str | None, after: tuple[str, str] | None, inside: Callable[[Record], bool]) -> None:
        read = 0
        for state in (*_FIRST, None):
            read = 0
            for record in self._rows(state, scope, after, inside):
                read += 1
                if redact(record.key) == self._given:
                    self.found[record.scope, record.key] = record
        self._cut |= read == LOOKED

    def _rows(
        self, state: State | None, scope: str | None, after: tuple[str, str] | None, inside: Callable[[Record], bool]
    ) -> Iterator[Record]:
        """At most LOOKED rows after this place, in their order, until one is not inside."""
        left = LOOKED
        while left:
            page = self._store.listing(state, scope, limit=min(_PAGE, left), after=after)
            for record in page:
                if not inside(record):
                    return
                yield record
            if len(page) < min(_PAGE, left):
                return
            left -= len(page)
            after = (page[-1].scope, page[-1].key)

    def only(self, reveal: bool) -> tuple[str, str]:
        """The place of the one key that was found."""
        if len(self.found) == 1:
            return next(iter(self.found))
        if self.found:
            raise OperatorError(_choice(self._given, list(self.found.values()), reveal))
        where = "of any scope" if self._everywhere else "of this scope"
        read = "" if self._everywhere else " of the scope"
        unread = f", and only the first {LOOKED:,} keys{read} were read: give the key whole" * self._cut
        advice = "the key has expired, or the app uses another store"
        if not self._everywhere:
            in_all = shlex.join(["oncekey", "keys", "show", self._given])
            advice = (
                f"give --scope, and --endpoint, as the log line has them, or look in all scopes with `{in_all}`; "
                "or the key has expired"
            )
        raise KeyNotFound(f"no key {where} is masked as {self._given}: {advice}{unread}")


def _choice(given: str, found: list[Record], reveal: bool) -> str:
    one_scope = len({record.scope for record in found}) == 1
    if not one_scope:
        lines = [f"{len(found)} keys are masked as {given}. Each is shown by the command in front of it:"]
    else:
        how = "give one whole" if reveal else f"`oncekey keys show '{given}' --reveal` shows them, to give one whole"
        lines = [f"{len(found)} keys of this scope are masked as {given}; {how}:"]
    for record in found[:_LISTED]:
        name = f"{ascii(record.key)[1:-1]}  " if reveal else ""
        command = "" if one_scope else f"{_show_command(given, record.scope)}  "
        age = span(record.now - record.created_at)
        lines.append(f"  {command}{name}{record.operation}  {record.state}  created {age} ago")
    return "\n".join([*lines, "  …"] if len(found) > _LISTED else lines)


def _show_command(given: str, scope: str) -> str:
    tenant, mark, endpoint = scope.partition(ENDPOINT_MARK)
    words = ["oncekey", "keys", "show", given, "--scope", tenant]
    return shlex.join([*words, "--endpoint", endpoint] if mark else words)
