"""The public conformance suite: a class that passes it is a store.

Say how to make your store, in a test file of your own, and run pytest::

    import pytest

    from oncekey.testing.store_suite import StoreSuite

    class TestMyStore(StoreSuite):
        @pytest.fixture(autouse=True)
        def _database(self, tmp_path):
            self.path = tmp_path / "keys.db"

        def make_store(self):
            return MyStore(self.path, clock=self.clock)

The first call of ``make_store`` in a test must return a store without rows. A further call in the same test must return
another object over the same rows. A store that uses a server's clock, and so takes no ``clock``, defines ``age``::

        def age(self, store, scope, key, seconds):
            ...  # UPDATE … SET lease_until = lease_until - seconds, and the same for all other times of the row

The suite is divided as the protocols of ``oncekey/stores/api.py`` are. Every store passes :class:`KeysSuite`,
:class:`StepsSuite` and :class:`InspectSuite`. Tests of a protocol that the store does not have are skipped, and the
reason names the methods that it lacks; so are tests of what its ``Capabilities`` do not promise. A store with an
outbox also passes :class:`OutboxSuite`, which must be told how a job is added. No test sleeps.

The suite kills processes between two calls, and never cuts a store off from its database. So these need tests of your
own: every wait has a time limit and ends in ``StoreUnavailable``, also that for a lock; a write that was torn in the
middle is no commit. Races are tried by chance: a store without a lock may pass most of them.
"""

from __future__ import annotations

from oncekey.stores.api import Store
from oncekey.testing.conformance.audits import AuditSuite
from oncekey.testing.conformance.base import Clock, missing_methods
from oncekey.testing.conformance.doubts import DoubtSuite
from oncekey.testing.conformance.faults import FaultSuite
from oncekey.testing.conformance.finds import FindSuite
from oncekey.testing.conformance.kept import KeptSuite
from oncekey.testing.conformance.lookups import LookupSuite
from oncekey.testing.conformance.moves import MoveSuite
from oncekey.testing.conformance.outbox import OutboxSuite
from oncekey.testing.conformance.rows import RowSuite
from oncekey.testing.conformance.shared_commit import SharedCommitSuite
from oncekey.testing.conformance.steps import StepSuite
from oncekey.testing.conformance.turns import TurnSuite

__all__ = ["Clock", "InspectSuite", "KeysSuite", "OutboxSuite", "StepsSuite", "StoreSuite"]


class KeysSuite(MoveSuite, RowSuite, TurnSuite, FaultSuite):
    """The rows of keys."""


class StepsSuite(StepSuite, DoubtSuite, FindSuite):
    """Steps, and the keys that are found by them."""


class InspectSuite(LookupSuite, AuditSuite):
    """Lists, numbers and the audit."""


class StoreSuite(KeysSuite, StepsSuite, InspectSuite, SharedCommitSuite, KeptSuite):
    """Subclass it as ``Test…``; see the module's docstring."""

    def test_store_has_keys_steps_and_inspect(self) -> None:
        """Every store has them. A method that is missing is named here, and its tests are skipped."""
        store = self.make_store()
        try:
            assert missing_methods(store, Store) == ""
        finally:
            if hasattr(store, "close"):
                store.close()
