"""Response bodies in WSGI: the app's iterable, and a response that passes through because it cannot be stored."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from oncekey.web.exchange import HELD, RUNNING

if TYPE_CHECKING:
    from oncekey.web.wsgi_shell import WsgiShell


class AppBody:
    """The app's iterable, run in its context, with the bytes from WSGI's old ``write`` function in front."""

    def __init__(self, iterable: Iterable[bytes], context: contextvars.Context, written: list[bytes]) -> None:
        self._iterable = iterable
        self._iterator = context.run(iter, iterable)
        self._context = context
        self._written = written
        self._open = True
        self._pieces = self._run()

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces  # always the same iterator, so that a second loop continues where the first stopped

    def _run(self) -> Iterator[bytes]:
        while True:
            try:
                chunk = self._context.run(next, self._iterator)
            except StopIteration:
                break
            yield from self._take_written()
            yield chunk
        yield from self._take_written()

    def _take_written(self) -> list[bytes]:
        taken, self._written[:] = list(self._written), []
        return taken

    def close(self) -> None:
        if self._open:
            self._open = False
            close = getattr(self._iterable, "close", None)
            if close is not None:
                self._context.run(close)


class Streamed:
    """A response that passes through. Its last piece waits for the store; a disconnect does not stop the handler."""

    def __init__(self, shell: WsgiShell, chunks: list[bytes], rest: AppBody) -> None:
        self._shell = shell
        self._rest = rest
        self._source = self._run(chunks)

    def _run(self, chunks: list[bytes]) -> Iterator[bytes]:
        shell, exchange = self._shell, self._shell.exchange
        last = chunks.pop()
        yield from chunks
        for chunk in self._checked():
            yield last
            last = chunk
        if exchange.stage is RUNNING:
            shell.conclude(None)
        if exchange.stage is HELD:
            self._rest.close()
            shell.settle()
        exchange.check_stream()
        yield last

    def _checked(self) -> Iterator[bytes]:
        try:
            yield from self._rest
        except GeneratorExit:
            raise  # this body is being closed; the app did not fail
        except BaseException as error:
            self._shell.failed(error)
            raise

    def __iter__(self) -> Iterator[bytes]:
        return self._source

    def close(self) -> None:
        try:
            for _ in self._source:
                pass  # the client disconnected, but the handler must run to its end
        finally:
            self._rest.close()
            self._shell.settle()
