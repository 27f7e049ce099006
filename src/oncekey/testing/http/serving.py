"""The app that a real server imports for the suite: ``wsgi()`` makes it for WSGI servers, ``asgi`` is it for ASGI.

It hands every request to the app of the running test. The test makes and closes that app, and asks what became of it,
through a Unix socket (``Host``, and ``Remote`` in ``served.py``). So one server process is enough for all tests of a
class, and each has an app, a OnceKey and a store of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Iterable
from multiprocessing.connection import Connection, Listener
from operator import attrgetter
from typing import Any

from oncekey.errors import ConfigurationError
from oncekey.stores.registry import open_store
from oncekey.testing.http.flaky import flaky
from oncekey.testing.http.protected import Framework, Protected
from oncekey.testing.http.served import CONTROL, Answer
from oncekey.testing.http.stack import SECONDS

DATA = (bool, int, float, str, bytes, list, tuple, set, dict, type(None))


class Host:
    """The app of the running test, and the thread that does what the test asks for."""

    def __init__(self) -> None:
        self.inside: Protected | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lifespan: Lifespan | None = None

    def make(self, framework: Framework, store_url: str, options: dict[str, Any]) -> None:
        """Make the app of a test. An ASGI app gets its lifespan, as from a server."""
        if framework.is_async != (self._loop is not None):
            kinds = ("ASGI", "WSGI") if framework.is_async else ("WSGI", "ASGI")
            raise ConfigurationError("the framework makes {} apps, and this server serves {}".format(*kinds))
        self.inside = Protected(framework, flaky(open_store(store_url)), **options)
        if self._loop is not None:
            self._lifespan = Lifespan(self.inside.app)
            self._in_loop(self._lifespan.begin())

    def close(self) -> None:
        """Close the app, whatever still waits in it."""
        if self.inside is None:
            return
        inside, self.inside = self.inside, None
        inside.payments.go.set()
        if self._loop is None or self._lifespan is None:
            inside.close_blocking()
        else:
            self._in_loop(self._lifespan.end())
            self._in_loop(inside.close_in_loop())

    def _in_loop(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(run(), self._loop).result(SECONDS)

    # ---------------------------------------------------------------- what a test asks for

    def listen(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        threading.Thread(target=self._listen, name="suite-control", daemon=True).start()

    def _listen(self) -> None:
        with Listener(os.environ[CONTROL], "AF_UNIX") as listener:
            while True:
                with listener.accept() as connection:
                    self._talk(connection)

    def _talk(self, connection: Connection) -> None:
        while True:
            try:
                verb, path, given = connection.recv()
            except EOFError:
                return
            try:
                connection.send(self._answer(verb, path, given))
            except Exception as error:  # noqa: BLE001 - the test is to see it
                connection.send(Answer(error=f"{type(error).__name__}: {error}"))

    def _answer(self, verb: str, path: str, given: tuple[Any, ...]) -> Answer:
        if verb == "set":
            owner, _, name = path.rpartition(".")
            setattr(attrgetter(owner)(self), name, *given)
            return Answer()
        value = attrgetter(path)(self)
        if verb == "call":
            return Answer(value(*given))
        return Answer(value) if isinstance(value, DATA) else Answer(is_object=True)


class Lifespan:
    """The lifespan of one ASGI app; nothing, if the app has none."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def begin(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.create_task(self._app(scope, self._asked.get, self._told.put))
        await self._next("lifespan.startup")

    async def end(self) -> None:
        if not self._task.done():
            await self._next("lifespan.shutdown")
            await asyncio.wait([self._task])

    async def _next(self, message: str) -> None:
        """Send a message, and wait until the app has answered it or ended."""
        self._asked.put_nowait({"type": message})
        told = asyncio.create_task(self._told.get())
        await asyncio.wait([told, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            told.cancel()
            self._task.exception()  # it has no lifespan: servers pass over this, too


_host = Host()


def wsgi() -> Any:
    """Made in the process that serves: a server that forks calls it after the fork."""
    _host.listen()

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        assert _host.inside is not None, "a request before its app"
        pieces: Iterable[bytes] = _host.inside.app(environ, start_response)
        return pieces

    return app


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        _host.listen(asyncio.get_running_loop())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    assert _host.inside is not None, "a request before its app"
    await _host.inside.app(scope, receive, send)
