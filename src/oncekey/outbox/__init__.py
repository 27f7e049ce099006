"""The outbox: work that was committed with a business write, and the worker that does it."""

from oncekey.errors import Dead
from oncekey.outbox.tasks import Context, Response
from oncekey.outbox.worker import Worker

__all__ = ["Context", "Dead", "Response", "Worker"]
