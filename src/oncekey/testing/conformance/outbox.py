"""The part of the store suite about the outbox, for stores whose transactions a request can enlist.

It is a class of its own, because it must add a job as a request does, in a transaction::

    class TestMyOutbox(OutboxSuite):
        def make_store(self): ...

        def add_job(self, store, job):
            ...  # run enqueue_statement(dialect) with job_parameters(job), and commit

Claims must be fair by scope: ``job_turns.py`` says what that needs. A store may also end and claim jobs in one commit
(:class:`oncekey.stores.api.SharedTurn`); tests of that are skipped for a store that does not.

For a store that takes no ``clock``, also define how a job ages (:meth:`OutboxSuite.age_job`) and what time it is
(:meth:`OutboxSuite.now`).
"""

from __future__ import annotations

from oncekey.testing.conformance.job_moves import JobMoveSuite
from oncekey.testing.conformance.job_turns import JobTurnSuite
from oncekey.testing.conformance.job_upkeep import JobUpkeepSuite
from oncekey.testing.conformance.jobs import JobSuite
from oncekey.testing.conformance.kept_jobs import KeptJobSuite


class OutboxSuite(JobSuite, JobMoveSuite, JobTurnSuite, JobUpkeepSuite, KeptJobSuite):
    """Subclass it as ``Test…``; see the module's docstring."""
