"""The start and the end of a protected ASGI app, by the server's lifespan messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, OperatorError, SchemaError
from oncekey.upkeep.service import Upkeep
from oncekey.web import tuning
from oncekey.web.asgi_scope import App, Message, Receive, Scope, Send
from oncekey.web.event_loop import require_asyncio

_log = logging.getLogger("oncekey")


class Lifespan:
    """One run of an app. At shutdown handlers end first, then the app, then oncekey."""

    upkeep: Upkeep | None = None
    tuned = False

    def __init__(self, app: App, once: OnceKey, make_upkeep: Callable[[], Upkeep] | None, *, tune: bool) -> None:
        self.app = app
        self.once = once
        self.make_upkeep = make_upkeep
        self.tune = tune

    async def start(self, prepare: Callable[[], None], send: Send) -> None:
        """Prepare, and check the tables. If the app must not start, tell the server why, and raise.

        Frameworks raise here, too. Starlette's test client takes a lifespan that ends without an error for a start: the
        tests of an app would go on, and then wait for ever for its shutdown.
        """
        try:
            require_asyncio()
            prepare()
            await asyncio.to_thread(self.once.start)
        except (SchemaError, ConfigurationError) as error:
            _log.error("%s", error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        except OperatorError as error:
            _log.error("the store is not reachable at start; requests get 503 until it is: %s", error)

    async def run(self, first: Message, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app until its end. ``first``: the message that was received already."""
        waiting = [first]

        async def receive_all() -> Message:
            message = waiting.pop() if waiting else await receive()
            if message["type"] == "lifespan.shutdown":
                await self.once.drain()  # before the app closes what its handlers use
                await self._stop_upkeep()  # before the app closes what its resolvers use
            return message

        async def send_all(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._started()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await asyncio.to_thread(self.once.close)
            await send(message)

        try:
            await self.app(scope, receive_all, send_all)
        finally:
            await self._stop_upkeep()  # the app may have ended without a shutdown
            if self.tuned:
                tuning.restore()

    def _started(self) -> None:
        if self.make_upkeep is not None and self.upkeep is None:
            self.upkeep = self.make_upkeep()
            self.upkeep.start()
        if self.tune and not self.tuned:
            self.tuned = True
            tuning.settle()

    async def _stop_upkeep(self) -> None:
        running, self.upkeep = self.upkeep, None
        if running is not None:
            await running.astop()
