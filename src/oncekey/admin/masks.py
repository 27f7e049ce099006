"""Finds the key of a masked key in a log line (``orde~36fd3064``, ``~fa23ec8c``).

The search is bounded. Letters before the ``~`` are a range of the primary key: only keys that begin with them are read.
If there are no letters, or very many keys begin with them, reading ends after ``LOOKED`` keys. Operators mostly ask for
keys that are unknown or in flight. Their states have indexes, so they are read first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from oncekey.admin.doctor import span
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.errors import KeyNotFound, OperatorError
from oncekey.stores.api import Store
from oncekey.telemetry.redaction import redact

LOOKED = 100_000
"""How many keys are read: first of each state in ``_FIRST``, then of all states."""
_PAGE = 10_000
_FIRST = (State.UNKNOWN, State.IN_PROGRESS, State.PENDING)
_LISTED = 20
_MASK = re.compile(r"(.{4})?~[0-9a-f]{8}", re.DOTALL).fullmatch


def whole_key(store: Store, scope: str, given: str, *, reveal: bool = False) -> str:
    """The key with the mask ``given``; ``given`` itself if it is not a mask, or is a key that looks like a mask.

    KeyNotFound if no key of this scope has that mask, OperatorError if several have it.
    """
    if (mask := _MASK(given)) is None or store.read([(scope, given)])[0] is not None:
        return given
    found: dict[str, Record] = {}
    read = 0
    for state in (*_FIRST, None):
        read = 0
        for record in _beginning(store, scope, mask[1] or "", state):
            read += 1
            if redact(record.key) == given:
                found[record.key] = record
    if len(found) == 1:
        return next(iter(found))
    if found:
        raise OperatorError(_choice(given, list(found.values()), reveal))
    unread = f", and only the first {LOOKED:,} keys of the scope were read: give the key whole" * (read == LOOKED)
    raise KeyNotFound(
        f"no key of this scope is masked as {given}: give --scope, and --endpoint, as the log line has them; "
        f"or the key has expired{unread}"
    )


def _beginning(store: Store, scope: str, start: str, state: State | None) -> Iterator[Record]:
    """At most LOOKED keys that are longer than ``start`` and begin with it, in their order."""
    after = (scope, start)
    left = LOOKED
    while left:
        page = store.listing(state, scope, limit=min(_PAGE, left), after=after)
        for record in page:
            if not record.key.startswith(start):
                return
            yield record
        if len(page) < min(_PAGE, left):
            return
        left -= len(page)
        after = (scope, page[-1].key)


def _choice(given: str, found: list[Record], reveal: bool) -> str:
    how = "give one whole" if reveal else f"`oncekey keys show '{given}' --reveal` shows them, to give one whole"
    lines = [f"{len(found)} keys of this scope are masked as {given}; {how}:"]
    for record in found[:_LISTED]:
        name = f"{ascii(record.key)[1:-1]}  " if reveal else ""
        lines.append(f"  {name}{record.operation}  {record.state}  created {span(record.now - record.created_at)} ago")
    return "\n".join([*lines, "  …"] if len(found) > _LISTED else lines)
