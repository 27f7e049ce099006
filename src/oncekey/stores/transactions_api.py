"""The part of the interfaces for stores whose database the app uses, too: a request enlists the app's transaction.

``api.py`` has the other interfaces. Import these from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from oncekey.core.jobs import NewJob
from oncekey.core.steps import Step
from oncekey.core.swaps import Swap
from oncekey.core.values import value


class Hold(Protocol):
    """A turn to write, in a database that has one writer. An enlisted transaction has it, and gives it back once."""

    too_long: str
    """The log line for a transaction that kept its turn for too long, with ``%s`` for its operation, for what it is,
    and for the seconds."""

    def try_now(self) -> bool:
        """Take the turn if that needs no waiting."""
        ...

    def take(self) -> None:
        """Block until the turn comes, or raise StoreUnavailable."""
        ...

    async def take_async(self) -> None:
        """As ``take``, without a thread that waits."""
        ...

    def release(self) -> None: ...


@value
class TransactionStatements:
    """What runs on the app's connection. Each field has a few statements; the last one returns the rows."""

    enlist: tuple[str, ...]
    still: tuple[str, ...]
    complete: tuple[str, ...]
    advance: tuple[str, ...]
    complete_or_fail: str = ""
    """As ``complete``, in one statement that fails where it finds no row, so that COMMIT can be sent with it; it takes
    ``expires_at`` too. Empty: the database has no use for it."""


@runtime_checkable
class Sealing(Protocol):
    """The store encrypts values in its verbs. What runs on the app's own connection passes none of them, so the engine
    asks here first."""

    def sealed_swap(self, change: Swap) -> Swap: ...

    def sealed_step(self, scope: str, key: str, step: Step) -> Step: ...

    def sealed_job(self, job: NewJob) -> NewJob: ...


class NotSealed:
    """For stores without encryption: the values as they are."""

    def sealed_swap(self, change: Swap) -> Swap:
        return change

    def sealed_step(self, scope: str, key: str, step: Step) -> Step:  # noqa: ARG002
        return step

    def sealed_job(self, job: NewJob) -> NewJob:
        return job


NOT_SEALED = NotSealed()


@runtime_checkable
class Transactions(Protocol):
    """A request can enlist a transaction of the app's own in the database that has the keys."""

    @property
    def dialect(self) -> str:
        """The database's name in SQLAlchemy. Only a connection of the same dialect can be enlisted."""
        ...

    @property
    def file(self) -> Path | None:
        """The file that an enlisted connection must have open; None: the database is a server."""
        ...

    @property
    def transaction_statements(self) -> TransactionStatements: ...

    def hold(self, timeout: float) -> Hold | None:
        """A turn to write, not taken yet; None: the database has many writers."""
        ...

    def fate(self, number: int | str) -> str | None:
        """The state of a transaction, by what its enlist statements returned: committed, aborted, or in progress;
        None: the database does not know."""
        ...

    def locked_elsewhere(self) -> bool:
        """Whether a connection that is not oncekey's keeps all others from writing now. Does not wait."""
        ...
