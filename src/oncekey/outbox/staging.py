"""How a job gets into the outbox: the statement and its parameters, for whoever holds the transaction.

They lie with the stores (``stores/enqueue.py``), because the engine, which must not know this room, runs them too.
"""

from oncekey.stores.enqueue import enqueue_statement, job_parameters

__all__ = ["enqueue_statement", "job_parameters"]
