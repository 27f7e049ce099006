"""A store around a store: its verbs seal what goes in, and open what comes out.

So the engine, workers, upkeep and the command line see plain values, and the store, its files and its cache see sealed
ones. ``sealed`` gives the outer store exactly the protocols that the inner one has: one class of this package for each.
There is no way past these classes: a verb that is not here does not exist outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.diagnosis import Diagnosis
from oncekey.core.health import StoreHealth
from oncekey.core.jobs import NewJob
from oncekey.core.rates import Tally
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.encryption.in_loop import SealedInLoop
from oncekey.encryption.keyring import Keyring
from oncekey.encryption.outbox import SealedOutbox, SealedTurn
from oncekey.encryption.transactions import SealedTransactions
from oncekey.encryption.values import LOSS, Values, with_contents
from oncekey.errors import ConfigurationError
from oncekey.stores.api import (
    Capabilities,
    Duty,
    Epochs,
    EventLoops,
    InLoop,
    Outbox,
    SharedCommit,
    SharedTurn,
    Store,
    Tallies,
    Transactions,
)
from oncekey.stores.cache.client import Identified
from oncekey.stores.kept_api import Kept


class SealedStore:
    """The verbs that every store has. ``inner`` is the store that has the rows; it sees sealed values only."""

    inner: Any

    def __init__(self, inner: Store, keyring: Keyring) -> None:
        self.inner = inner
        self.keyring = keyring
        self.values = Values(keyring)

    @property
    def capabilities(self) -> Capabilities:
        found: Capabilities = self.inner.capabilities
        return found

    # -- keys ------------------------------------------------------------------------------------------------------

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        return self._found(self.inner.reserve(batch))

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        changes = self._changes(batch)
        return self._moved(batch, changes, self.inner.swap(changes))

    def _changes(self, batch: Sequence[Swap]) -> list[Swap]:
        seal = self.values.sealed_swap
        return [seal(change) for change in batch]

    def _found(self, answers: Sequence[Found]) -> list[Found]:
        opened = self.values.opened_record
        return [each if each.record is None else Found(opened(each.record)) for each in answers]

    def _moved(
        self, batch: Sequence[Swap], changes: Sequence[Swap], answers: Sequence[Record | None]
    ) -> list[Record | None]:
        """The rows after their moves. A row that has what its swap wrote needs no opening."""
        moved: list[Record | None] = []
        for asked, written, row in zip(batch, changes, answers, strict=True):
            if row is None:
                moved.append(None)
            elif written is asked or (row.response, row.last_error) != (written.response, written.last_error):
                moved.append(self.values.opened_record(row))
            else:
                moved.append(with_contents(row, asked.response, asked.last_error))
        return moved

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        opened = self.values.opened_record
        return [None if row is None else opened(row) for row in self.inner.read(keys)]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        opened = self.values.opened_record
        return [opened(row) for row in self.inner.due(duty, limit)]

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        deleted: int = self.inner.purge(limit, expired_state_only=expired_state_only)
        return deleted

    def migrate(self) -> list[str]:
        ran: list[str] = self.inner.migrate()
        return ran

    def check(self) -> None:
        self.inner.check()

    def disconnect(self) -> None:
        self.inner.disconnect()

    def close(self) -> None:
        self.inner.close()

    # -- steps -----------------------------------------------------------------------------------------------------

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        opened = self.values.opened_step
        found = zip(keys, self.inner.steps(keys), strict=True)
        return [[opened(step, (asked.scope, asked.key)) for step in steps] for asked, steps in found]

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = self.inner.find(downstream_key=downstream_key, provider_id=provider_id)
        return found

    # -- for operators ---------------------------------------------------------------------------------------------

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        return [self.values.opened_line(line) for line in self.inner.audit(scope, key, limit)]

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        deleted: int = self.inner.purge_audit(limit, keep_seconds)
        return deleted

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: tuple[str, str] | None = None,
    ) -> list[Record]:
        opened = self.values.opened_record
        return [opened(row) for row in self.inner.listing(state, scope, operation, older_than, limit, after)]

    def counts(self) -> StoreHealth:
        found: StoreHealth = self.inner.counts()
        return found

    def diagnose(self) -> list[Diagnosis]:
        found: list[Diagnosis] = self.inner.diagnose()
        return found

    # -- what the engine writes on the app's own connection -----------------------------------------------------------

    def sealed_swap(self, change: Swap) -> Swap:
        return self.values.sealed_swap(change)

    def sealed_step(self, scope: str, key: str, step: Step) -> Step:
        return self.values.sealed_step(step, (scope, key))

    def sealed_job(self, job: NewJob) -> NewJob:
        return self.values.sealed_job(job)


class SealedCommit(SealedStore):
    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        changes = self._changes(ends)
        found, moved = self.inner.both(begins, changes)
        return self._found(found), self._moved(ends, changes, moved)


class SealedLoops(SealedStore):
    def in_loop(self) -> InLoop | None:
        connection: InLoop | None = self.inner.in_loop()
        return None if connection is None else SealedInLoop(connection, self.values)


class SealedTallies(SealedStore):
    def tally(self, asked: Tally) -> int:
        number: int = self.inner.tally(asked)
        return number


class SealedEpochs(SealedStore):
    def init(self) -> str:
        epoch: str = self.inner.init()
        return epoch

    def accept_loss(self, audit: Audit) -> str:
        epoch: str = self.inner.accept_loss(self.values.sealed_audit(audit, LOSS))
        return epoch

    def left_after_loss(self, limit: int) -> Sequence[Kept]:
        """As they are kept: nothing is opened."""
        rows: Sequence[Kept] = self.inner.left_after_loss(limit)
        return rows


class SealedIdentity(SealedStore):
    def identity(self) -> str:
        name: str = self.inner.identity()
        return name


_PARTS: tuple[tuple[type, type], ...] = (
    (SharedTurn, SealedTurn),  # before the class that it extends
    (Outbox, SealedOutbox),
    (Transactions, SealedTransactions),
    (SharedCommit, SealedCommit),
    (EventLoops, SealedLoops),
    (Tallies, SealedTallies),
    (Epochs, SealedEpochs),
    (Identified, SealedIdentity),
)
"""For each protocol that a store may have, the class that has it outside."""


def sealed(store: Store, keyring: Keyring) -> Store:
    """The store, with all contents encrypted. It has the protocols of ``store``, and no other."""
    if isinstance(store, SealedStore):
        raise ConfigurationError("this store encrypts already: give a keyring once, to OnceKey(encryption=…)")
    parts = tuple(part for protocol, part in _PARTS if isinstance(store, protocol))
    made: Store = _composed(parts)(store, keyring)
    return made


@lru_cache
def _composed(parts: tuple[type, ...]) -> type:
    return type("SealedStore", (*parts, SealedStore), {})
