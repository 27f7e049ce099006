"""A wrapper around a session of aiohttp::

    async with aiohttp.ClientSession() as session:
        api = IdempotentSession(session, "https://api.example.com")
        answer = await api.post("/payments", json={"amount": 500})
        answer.status, answer.json()

It is a wrapper and not a middleware: a middleware of aiohttp has handed on the response before its body has arrived, so
it cannot repeat a request whose answer breaks off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urljoin

import aiohttp
import orjson
from yarl import URL

from oncekey.client.attempts import Attempts, Rules
from oncekey.client.decisions import Kind, Seen
from oncekey.client.reading import Answer, answer_of, origin
from oncekey.errors import ConfigurationError

__all__ = ["IdempotentSession"]

_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError)


class IdempotentSession:
    """``base_url`` comes before paths that are not whole URLs. The others: see ``Rules``."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str = "",
        *,
        rules: Rules | None = None,
        sleep: Callable[[float], Any] = asyncio.sleep,
        **options: Any,
    ) -> None:
        self._session = session
        self._base = base_url
        self._rules = rules or Rules(**options)
        self._sleep = sleep

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        data: bytes | str | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Answer:
        """The answer, read whole. ``options`` go to ``session.request``."""
        lines = list((headers or {}).items())
        body = data.encode() if isinstance(data, str) else data or b""
        if json is not None:
            body = orjson.dumps(json)
            if not any(name.lower() == "content-type" for name, _ in lines):
                lines.append(("Content-Type", "application/json"))
        elif not isinstance(body, bytes):
            raise ConfigurationError("data= takes bytes or text, since it may be sent more than once")
        whole = URL(urljoin(self._base, url))
        if not whole.absolute:
            raise ConfigurationError("give the whole URL, or IdempotentSession(session, base_url)")
        if self._base and origin(str(whole)) != origin(self._base):
            raise ConfigurationError(
                f"this IdempotentSession is for {self._base}, and what its session sends along must not go to "
                f"{whole.origin()}. Nothing was sent: make another one for that server, or leave base_url out"
            )
        attempts = self._rules.attempts(method, str(whole.update_query(params or {})), lines, body)
        await self._blocking(attempts, attempts.begin)
        while attempts.kept is None:
            try:
                async with asyncio.timeout(attempts.seconds_left):
                    answer = await self._send(attempts, options)
            except (TimeoutError, *_NOT_CONNECTED, *_LOST) as error:
                step = attempts.failed(_seen(error), error)
                await self._blocking(attempts, attempts.save)
                if not step.again:
                    raise
            else:
                step = attempts.answered(answer)
                await self._blocking(attempts, attempts.save)
                if step.error:
                    raise step.error
                if not step.again:
                    return answer
            await self._sleep(step.wait)
        return attempts.kept

    async def _send(self, attempts: Attempts, options: Mapping[str, Any]) -> Answer:
        now = attempts.request
        options = dict(options)
        if attempts.kind is Kind.KEYED:  # Attempts follows those that may have the key
            options["allow_redirects"] = False
        async with self._session.request(
            now.method,
            URL(now.url, encoded=True),
            **options,
            headers=[line for line in now.headers if line[0].lower() not in ("content-length", "transfer-encoding")],
            data=now.body or None,
            raise_for_status=False,
        ) as response:
            body = await response.read()
            # aiohttp has decoded the body
            headers = [line for line in response.headers.items() if line[0].lower() != "content-encoding"]
            return answer_of(response.status, headers, body)

    async def _blocking(self, attempts: Attempts, work: Callable[[], None]) -> None:
        if attempts.call is not None:
            await asyncio.shield(asyncio.to_thread(work))

    async def get(self, url: str, **options: Any) -> Answer:
        return await self.request("GET", url, **options)

    async def post(self, url: str, **options: Any) -> Answer:
        return await self.request("POST", url, **options)

    async def put(self, url: str, **options: Any) -> Answer:
        return await self.request("PUT", url, **options)

    async def patch(self, url: str, **options: Any) -> Answer:
        return await self.request("PATCH", url, **options)

    async def delete(self, url: str, **options: Any) -> Answer:
        return await self.request("DELETE", url, **options)


def _seen(error: BaseException) -> Seen:
    if isinstance(error, _NOT_CONNECTED):
        return Seen.NOT_CONNECTED
    return Seen.TIMED_OUT if isinstance(error, TimeoutError) else Seen.LOST
