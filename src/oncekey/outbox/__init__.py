"""The outbox: jobs that were committed together with a business write, and the worker that runs them."""

from oncekey.errors import Dead
from oncekey.outbox.tasks import Context, Response
from oncekey.outbox.worker import Worker

__all__ = ["Context", "Dead", "Response", "Worker"]
