"""The public conformance suite: a class that passes it is a store.

Say how to make your store, in a test file of your own, and run pytest::

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

No test sleeps. Tests of what a store does not promise (``Capabilities``) are skipped; all others run for every store.
"""

from __future__ import annotations

from oncekey.testing.conformance.base import Clock
from oncekey.testing.conformance.doubts import DoubtSuite
from oncekey.testing.conformance.faults import FaultSuite
from oncekey.testing.conformance.lookups import LookupSuite
from oncekey.testing.conformance.moves import MoveSuite
from oncekey.testing.conformance.outbox import OutboxSuite
from oncekey.testing.conformance.rows import RowSuite
from oncekey.testing.conformance.steps import StepSuite
from oncekey.testing.conformance.turns import TurnSuite

__all__ = ["Clock", "OutboxSuite", "StoreSuite"]


class StoreSuite(MoveSuite, RowSuite, StepSuite, DoubtSuite, LookupSuite, TurnSuite, FaultSuite):
    """Subclass it as ``Test…``; see the module's docstring."""
