"""The part of the interfaces for the values that encryption covers, as the store has them: sealed, or plain.

``oncekey keys re-encrypt`` walks over them and writes them again under another key (``oncekey.encryption.rotation``).
``api.py`` has the other interfaces. Import these from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from oncekey.core.audit import Audit
from oncekey.core.states import State
from oncekey.core.values import value

OPERATORS_LINE = ("", "oncekey:re-encrypt")
"""The scope and key of the audit's lines about a walk over all rows: they belong to no key."""
BEFORE = "any key"


@value
class KeptKey:
    """Of a row of ``idempotency_keys``: the response, and the error of its last attempt."""

    scope: str
    key: str
    status: int | None
    """None: there is no response."""
    headers: str | None
    """JSON, as it is stored."""
    body: bytes | None
    schema_version: int | None
    last_error: str | None
    state: State
    fingerprint_version: int
    expires_at: float

    @property
    def place(self) -> tuple[str, ...]:
        return ("key", self.scope, self.key)


@value
class KeptStep:
    """The result of a step. A step without a result is not handed out."""

    scope: str
    key: str
    name: str
    result: bytes

    @property
    def place(self) -> tuple[str, ...]:
        return ("step", self.scope, self.key, self.name)


@value
class KeptLine:
    """The reason in a line of the audit."""

    scope: str
    key: str
    number: str
    """What tells the lines of a key apart. It stays when the line is written again."""
    event: str
    why: str

    @property
    def place(self) -> tuple[str, ...]:
        return ("line", self.scope, self.key, self.number)


@value
class KeptJob:
    """Of a row of the outbox."""

    id: str
    scope: str
    key: str
    payload: bytes
    last_error: str | None
    history: bytes
    """JSON: the attempts that failed, each with its error."""

    @property
    def place(self) -> tuple[str, ...]:
        return ("job", self.id)


Kept = KeptKey | KeptStep | KeptLine | KeptJob
"""The kept values of one row. ``place`` names the row: no two rows of a store have the same."""


@value
class KeptPage:
    rows: Sequence[Kept]
    next: str
    """Where the next page begins; empty: there is none. It holds keys of clients, so it belongs in no log."""


@value
class Rewrite:
    """Write ``new`` over ``old``, two values of the same place. It changes headers, body, schema version and texts."""

    old: Kept
    new: Kept


@runtime_checkable
class KeptValues(Protocol):
    """All values that encryption covers can be read page by page, and each written again if it still is as it was."""

    def kept(self, after: str, limit: int) -> KeptPage:
        """The next page of rows, of every kind that the store has. ``after``: ``next`` of the last page, or empty.

        It looks at about ``limit`` rows, so a page may have none and yet not be the last. Each row that is there from
        the first page to the last is on one page, and on one only. Memory and work for a page do not depend on how
        many rows there are: pages follow the order of an index.
        """
        ...

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        """Replace each value that still is ``old``. False: it is not, the row is gone, or a transaction holds it now.

        It compares all values of the row, and nothing else: neither state nor owner. It changes no other column, so a
        move of the row by the app neither stops it nor is stopped by it. A batch names each place once.
        """
        ...

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        """Write a line of the audit at ``OPERATORS_LINE``: an operator had all values written again.

        ``after``: what they are now, in at most 16 characters. The line says ``BEFORE`` for what they were.
        """
        ...
