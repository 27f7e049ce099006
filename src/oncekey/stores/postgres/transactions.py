"""What an enlisted transaction needs of PostgreSQL: its statements, and the server's word about how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, LiteralString

from oncekey.errors import StoreError
from oncekey.stores.api import TransactionStatements
from oncekey.stores.postgres.statements import PACKAGE, statement
from oncekey.stores.sql import queries

if TYPE_CHECKING:
    import psycopg

_FATE = statement("transaction_fate")
_IN_THE_FUTURE = "22023"
"""The SQLSTATE for a number that the server has not given to a transaction."""


class PostgresTransactions:
    """A part of :class:`oncekey.stores.postgres.store.PostgresStore`, which has the connection."""

    dialect = "postgresql"
    file = None
    transaction_statements: ClassVar = TransactionStatements(
        enlist=queries.bare(PACKAGE, "transaction_enlist"),
        still=queries.bare(PACKAGE, "transaction_still"),
        complete=queries.bare(PACKAGE, "transaction_complete"),
        advance=queries.bare(PACKAGE, "transaction_step", "transaction_advance"),
        complete_or_fail=queries.bare(PACKAGE, "transaction_complete_or_fail")[0],
    )

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _execute(self, statement: LiteralString, parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]: ...

    def hold(self, timeout: float) -> None:
        """There are many writers, so none waits for a turn."""
        del timeout

    def fate(self, number: int | str) -> str | None:
        self._start_clock()
        try:
            row = self._execute(_FATE, {"number": number}).fetchone()
        except StoreError as error:
            if getattr(error.__cause__, "sqlstate", None) == _IN_THE_FUTURE:
                # The server crashed before this number was on its disk. A commit writes it there first.
                return "aborted"
            raise
        answer: str | None = row[0] if row else None
        return answer

    def locked_elsewhere(self) -> bool:
        """Never: a transaction locks its own rows only."""
        return False
