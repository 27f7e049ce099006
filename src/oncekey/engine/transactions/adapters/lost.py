"""A connection that was lost while its transaction was enlisted: how an error says so, and what it means.

The database rolls back a transaction whose connection is lost. So nothing of the attempt is committed, the key can be
retried, and nothing in the handler needs to change.
"""

from __future__ import annotations

from typing import Any

RECONNECT_REFUSED = (
    "{} has lost its connection to the database, and the database rolls back the enlisted transaction. To connect "
    "again was refused: what is written on a new connection would be committed without the stored response, and a "
    "retry would write it again. Let the error leave the handler: the key can be retried, and the retry runs it again"
)
LOST = (
    "The database rolls back a transaction whose connection is lost, so nothing of this attempt is committed and the "
    "key can be retried; if oncekey cannot find that out, another line says that the key is unknown. The handler need "
    "not change. If it happens again, look for the reason in the log of the database server: a restart, a KILL, or a "
    "time-out of idle connections or transactions"
)

_CODES = frozenset({2006, 2013, 2055, 4031})
"""Of MySQL's client libraries, and of a server that ended an idle connection."""
_STATES = ("08", "57P01", "57P02", "57P05", "25P03")
"""How SQLSTATEs of PostgreSQL begin: a connection error, a shutdown, a crash, and time-outs of idle sessions."""


def says_connection_lost(error: BaseException | None) -> bool:
    """Whether an error of any driver, or its cause, says that the connection was lost."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "connection_invalidated", False) or _says(error) or _says(getattr(error, "orig", None)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _says(error: Any) -> bool:
    if isinstance(error, ConnectionError):
        return True
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        return state.startswith(_STATES)
    return any(code in _CODES for code in getattr(error, "args", ())[:1] if isinstance(code, int))
