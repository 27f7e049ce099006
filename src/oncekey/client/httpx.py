"""Transports for httpx, sync and async: any client or SDK built on httpx can use them.

    client = httpx.Client(transport=IdempotentTransport())

A request that changes state gets a key, and all its tries have the same one. A body is read into memory, because it may
be sent more than once. The answer to a request with a key is read whole before it is handed on, because a connection
can break in the middle of it; server-sent events are handed on as they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import httpx

from oncekey.client.attempts import Attempts, Rules
from oncekey.client.calls import Request
from oncekey.client.decisions import Kind, Seen
from oncekey.client.reading import Answer, answer_of

__all__ = ["AsyncIdempotentTransport", "IdempotentTransport"]

KEY_EXTENSION = "idempotency_key"
"""The name in ``response.extensions`` that has the key of the request."""

_NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LOST = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class IdempotentTransport(httpx.BaseTransport):
    """``transport``: what really sends; by default ``httpx.HTTPTransport()``. The others: see ``Rules``."""

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        rules: Rules | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        self._transport = transport or httpx.HTTPTransport()
        self._rules = rules or Rules(**options)
        self._sleep = sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        attempts = _attempts(self._rules, request)
        attempts.begin()
        while attempts.kept is None:
            sent = _to_send(attempts, request)
            try:
                response = self._transport.handle_request(sent)
                raw = self._read(response) if _is_buffered(attempts, response) else None
            except httpx.TransportError as error:
                if (seen := _seen(error)) is None:
                    raise
                step = attempts.failed(seen, error)
                attempts.save()
                if not step.again:
                    raise
            else:
                step = attempts.answered(_answer(response, raw))
                attempts.save()
                if step.again or step.error:
                    response.close()
                if step.error:
                    raise step.error
                if not step.again:
                    return _handed_back(attempts, request, response, raw)
            self._sleep(step.wait)
        return _from_jar(attempts, attempts.kept)

    def _read(self, response: httpx.Response) -> bytes:
        try:
            return b"".join(response.stream)  # type: ignore[arg-type]  # a sync transport has a sync stream
        finally:
            response.close()

    def close(self) -> None:
        self._transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """As ``IdempotentTransport``, for ``httpx.AsyncClient``, under asyncio and trio."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        rules: Rules | None = None,
        sleep: Callable[[float], Any] = anyio.sleep,
        **options: Any,
    ) -> None:
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._rules = rules or Rules(**options)
        self._sleep = sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        attempts = _attempts(self._rules, request)
        await self._blocking(attempts, attempts.begin)
        while attempts.kept is None:
            sent = _to_send(attempts, request)
            try:
                response = await self._transport.handle_async_request(sent)
                raw = await self._read(response) if _is_buffered(attempts, response) else None
            except httpx.TransportError as error:
                if (seen := _seen(error)) is None:
                    raise
                step = attempts.failed(seen, error)
                await self._blocking(attempts, attempts.save)
                if not step.again:
                    raise
            else:
                step = attempts.answered(_answer(response, raw))
                await self._blocking(attempts, attempts.save)
                if step.again or step.error:
                    await response.aclose()
                if step.error:
                    raise step.error
                if not step.again:
                    return _handed_back(attempts, request, response, raw)
            await self._sleep(step.wait)
        return _from_jar(attempts, attempts.kept)

    async def _blocking(self, attempts: Attempts, work: Callable[[], None]) -> None:
        """The jar waits for the disk: not in the event loop. A cancelled caller does not interrupt it."""
        if attempts.call is not None:
            await anyio.to_thread.run_sync(work)

    async def _read(self, response: httpx.Response) -> bytes:
        try:
            return b"".join([chunk async for chunk in response.stream])  # type: ignore[union-attr]
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


def _attempts(rules: Rules, request: httpx.Request) -> Attempts:
    headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in request.headers.raw]
    return rules.attempts(request.method, str(request.url), headers, request.content)


def _to_send(attempts: Attempts, request: httpx.Request) -> httpx.Request:
    now: Request = attempts.request
    lines = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in now.headers]
    left = attempts.seconds_left
    given = request.extensions.get("timeout") or {}
    timeout = {
        name: left if given.get(name) is None else min(given[name], left)
        for name in ("connect", "read", "write", "pool")
    }
    return httpx.Request(
        now.method,
        now.url,
        headers=[line for line in lines if line[0].lower() not in _FRAMING],
        content=now.body,
        extensions={**request.extensions, "timeout": timeout},
    )


def _is_buffered(attempts: Attempts, response: httpx.Response) -> bool:
    """Whether the body is needed before the decision. That of a download is not."""
    if attempts.call is not None:
        return True  # the jar keeps it
    if attempts.kind is Kind.KEYED:
        return not response.headers.get("content-type", "").startswith("text/event-stream")
    return response.status_code >= 300


def _answer(response: httpx.Response, raw: bytes | None) -> Answer:
    body = b""
    if raw:  # decoded: a problem document may be compressed
        try:
            body = httpx.Response(200, headers=_coding(response), content=raw).content
        except httpx.DecodingError:
            body = raw
    headers = [line for line in response.headers.multi_items() if line[0] != "content-encoding"]
    return answer_of(response.status_code, headers, body)


def _coding(response: httpx.Response) -> dict[str, str]:
    coding = response.headers.get("content-encoding")
    return {"content-encoding": coding} if coding else {}


def _handed_back(
    attempts: Attempts, request: httpx.Request, response: httpx.Response, raw: bytes | None
) -> httpx.Response:
    if attempts.kind is Kind.KEYED and 300 <= response.status_code < 400:
        request.headers.pop(attempts.form.header, None)  # httpx copies the headers when it follows with a GET
    extensions = {**response.extensions, KEY_EXTENSION: attempts.key}
    if raw is None:
        response.extensions = extensions
        return response
    stream = httpx.ByteStream(raw)
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=extensions)


def _from_jar(attempts: Attempts, kept: Answer) -> httpx.Response:
    extensions: dict[str, Any] = {KEY_EXTENSION: attempts.key, "http_version": b"HTTP/1.1"}
    return httpx.Response(kept.status, headers=list(kept.headers), content=kept.body, extensions=extensions)


def _seen(error: httpx.TransportError) -> Seen | None:
    """None: the request itself is wrong (its URL, its headers), and so would be the next."""
    if isinstance(error, _NOT_CONNECTED):
        return Seen.NOT_CONNECTED
    if isinstance(error, httpx.TimeoutException):
        return Seen.TIMED_OUT
    return Seen.LOST if isinstance(error, _LOST) else None
