"""What the text of a statement tells: whether it ends the transaction, whether it may, and whether it writes.

A watch on a driver's connection (``mysql_watch.py``, ``psycopg_watch.py``, ``asyncpg_watch.py``) shows each text to a
:class:`Judge` before it is sent.

To refuse a statement, a guard must be certain, so ``ends_transaction`` and ``writes`` look at the first words only.
``may_end_transaction`` is only a suspicion. No statement is refused for it, but a later rollback is no longer a proof.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from oncekey.errors import EnlistError

# A driver may have put a client's values into the text, so every pattern reads it once: no group gives back what it has
# taken, and a comment without an end is read to the end of the text.
_GAP = r"(?:\s|/\*(?:[^*]|\*(?!/))*+(?:\*/|$)|--[^\n]*+(?:\n|$))"
_END = rf"(?:commit|end|abort|rollback(?!{_GAP}+(?:(?:work|transaction){_GAP}+)?to\b)|prepare{_GAP}+transaction)\b"
_ENDS = re.compile(rf"(?:{_GAP}|;)*+({_END})", re.IGNORECASE).match
_MAY_END = re.compile(rf";(?:{_GAP}|;)*+({_END})?", re.IGNORECASE).finditer
_WRITES = re.compile(
    rf"(?:{_GAP}|;)*+(insert|update|delete|merge|replace|truncate|create|alter|drop)\b", re.IGNORECASE
).match


class Judge(Protocol):
    """Decides about each statement."""

    def sees(self, sql: str) -> str | None:
        """What to send in place of this statement. None: it ends the transaction, and is refused."""

    def refused(self) -> Any:
        """The error for what ``sees`` refused, or an awaitable of it."""

    def refuse_to_reconnect(self) -> EnlistError: ...


def ends_transaction(sql: str) -> str | None:
    """The verb of a COMMIT or ROLLBACK by hand; None for every other statement, also ROLLBACK TO SAVEPOINT."""
    found = _ENDS(sql)
    return found[1].upper() if found else None


def may_end_transaction(sql: str) -> bool:
    """Whether one of several statements in this text may be a COMMIT or ROLLBACK. It may also stand in a literal."""
    return ";" in sql and any(found[1] for found in _MAY_END(sql))


def writes(sql: str) -> str | None:
    """The verb of a statement that certainly writes; None for every other one."""
    found = _WRITES(sql)
    return found[1].upper() if found else None
