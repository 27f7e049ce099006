"""A sealed store and the app's own transactions. Nothing is sealed here: the engine seals what it writes there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncekey.stores.api import Hold, TransactionStatements


class SealedTransactions:
    if TYPE_CHECKING:
        inner: Any

    @property
    def dialect(self) -> str:
        name: str = self.inner.dialect
        return name

    @property
    def file(self) -> Path | None:
        path: Path | None = self.inner.file
        return path

    @property
    def transaction_statements(self) -> TransactionStatements:
        statements: TransactionStatements = self.inner.transaction_statements
        return statements

    def hold(self, timeout: float) -> Hold | None:
        turn: Hold | None = self.inner.hold(timeout)
        return turn

    def fate(self, number: int | str) -> str | None:
        ended: str | None = self.inner.fate(number)
        return ended

    def locked_elsewhere(self) -> bool:
        locked: bool = self.inner.locked_elsewhere()
        return locked
