"""The end of a protected request whose thread waits for the store: WSGI, and Django under WSGI.

``exchange.py`` decides what is stored. The shells add how the response is read and sent.
"""

from __future__ import annotations

from oncekey.core.policy import Policy
from oncekey.core.problems import Answer
from oncekey.engine.once import OnceKey
from oncekey.errors import OperatorError
from oncekey.web.exchange import HELD, RUNNING, STORING, Exchange


class BlockingEnd:
    """What both shells inherit."""

    once: OnceKey
    exchange: Exchange
    policy: Policy

    def failed(self, error: BaseException) -> Answer | None:
        """The app raised. Returns oncekey's answer, or None if the exception must reach the server or framework."""
        if self.exchange.stage is not RUNNING:
            return None
        answer = self.exchange.raised(error)
        self.store()
        return answer

    def settle(self) -> None:
        """The app has returned, so its transaction has ended or never will: store what waits for that. It sets
        ``instead`` if the app did not commit."""
        while self.exchange.stage is HELD:
            self.store()

    def store(self) -> None:
        """Store the end of the request."""
        exchange, engine = self.exchange, self.once.engine
        exchange.start_storing()
        try:
            finished = engine.run_blocking(exchange.finish(), self.policy.begin_seconds)
        except OperatorError:
            exchange.not_stored()
        else:
            exchange.finished(finished)
        finally:
            if exchange.stage is STORING:  # an unexpected error: release the gate for other writers
                exchange.abandon()
                engine.keeper.unwatch(exchange.operation)
                if exchange.operation.enlisted is not None:
                    exchange.operation.enlisted.release()
