"""The public conformance suite: whatever passes it is a store.

Give it a way to make your store, in a file of your own, and run pytest::

    from oncekey.testing.store_suite import StoreSuite

    class TestMyStore(StoreSuite):
        @pytest.fixture(autouse=True)
        def _database(self, tmp_path):
            self.path = tmp_path / "keys.db"

        def make_store(self):
            return MyStore(self.path, clock=self.clock)

``make_store`` is called with no rows in the store at the first call of a test, and again for a second object over
the same rows. A store that measures time on a server's clock, and so takes no ``clock``, says how a row ages::

        def age(self, store, scope, key, seconds):
            ...  # UPDATE … SET lease_until = lease_until - seconds, and so all other times of the row

No test sleeps. What a store does not promise (``Capabilities``) is skipped; nothing else differs between stores.
"""

from __future__ import annotations

import pytest

# Before they are imported: a failing assert in them then shows its values.
for _part in ("base", "moves", "rows", "steps", "lookups", "faults", "jobs_base", "jobs", "job_upkeep"):
    pytest.register_assert_rewrite(f"oncekey.testing.store_suite_{_part}")

from oncekey.testing.store_suite_base import Clock  # noqa: E402
from oncekey.testing.store_suite_faults import FaultSuite  # noqa: E402
from oncekey.testing.store_suite_lookups import LookupSuite  # noqa: E402
from oncekey.testing.store_suite_moves import MoveSuite  # noqa: E402
from oncekey.testing.store_suite_outbox import OutboxSuite  # noqa: E402
from oncekey.testing.store_suite_rows import RowSuite  # noqa: E402
from oncekey.testing.store_suite_steps import StepSuite  # noqa: E402

__all__ = ["Clock", "OutboxSuite", "StoreSuite"]


class StoreSuite(MoveSuite, RowSuite, StepSuite, LookupSuite, FaultSuite):
    """Subclass it as ``Test…``; see the module's docstring."""
