"""What an enlisted transaction needs of MySQL: its statements, and what the key's row tells about how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from oncekey.stores.api import TransactionStatements
from oncekey.stores.mysql.packets import PACKAGE, statement
from oncekey.stores.sql import queries

_FATE, _THERE = statement("transaction_fate"), statement("transaction_there")


class MysqlTransactions:
    """A part of :class:`oncekey.stores.mysql.store.MysqlStore`, which has the connection."""

    dialect = "mysql"
    file = None
    transaction_statements: ClassVar = TransactionStatements(
        enlist=queries.bare(PACKAGE, "transaction_savepoint", "transaction_mark", "transaction_marked"),
        still=queries.bare(PACKAGE, "transaction_release", "transaction_savepoint", "transaction_still"),
        complete=queries.bare(PACKAGE, "transaction_release", "transaction_complete", "transaction_completed"),
        advance=queries.bare(
            PACKAGE, "transaction_release", "transaction_step", "transaction_advance", "transaction_advanced"
        ),
    )

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _send(self, text: str, **values: Any) -> list[Any]: ...

    def hold(self, timeout: float) -> None:
        """There are many writers, so none waits for a turn."""
        del timeout

    def fate(self, number: int | str) -> str | None:
        """MySQL forgets transactions. But this one wrote a number into its key's row before anything else: if the row
        has that number, it was committed; if the row is free and has another one, it was rolled back."""
        self._start_clock()
        scope, key, owner, mark = str(number).split(":")
        at = {"scope": scope, "key": key, "owner": owner}
        (rows,) = self._send(_FATE, **at, number=int(mark))
        if rows:
            return "committed" if rows[0][0] else "aborted"
        (there,) = self._send(_THERE, **at)
        return "in progress" if there else None

    def locked_elsewhere(self) -> bool:
        """Never: a transaction locks its own rows only."""
        return False
