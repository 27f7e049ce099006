"""Adds a job to the outbox: the statement and its parameters, to be run in a transaction of the app.

They are in ``stores/sql/enqueue.py``, because the engine runs them too and must not import the outbox.
"""

from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters

__all__ = ["enqueue_statement", "job_parameters"]
