"""``Client`` and ``AsyncClient``: httpx with keys, retries and a key jar.

::

    client = Client("https://api.example.com", jar="sqlite:///intents.db", headers={"Authorization": …})
    with client.intent("order-42") as intent:
        response = intent.post("/payments", json={"amount": 500})

After a crash the same lines run again: the response comes from the jar, or the server is asked with the same key.
``client.resume()`` finishes what no one asks for again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import httpx

from oncekey.client.attempts import Rules
from oncekey.client.base import ClientBase
from oncekey.client.budget import Budget
from oncekey.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from oncekey.client.jar import Intent, KeyJar, Row
from oncekey.client.jar.jar import entered
from oncekey.client.network import network_options
from oncekey.client.reading import Answer
from oncekey.client.resumption import Outcome, result_of
from oncekey.client.spelling import Spelling

__all__ = ["AsyncClient", "AsyncClientIntent", "Client", "ClientIntent"]


class ClientIntent:
    """One operation: ``key``, and the request that it stands for."""

    def __init__(self, client: Client, intent: Intent) -> None:
        self._client = client
        self._intent = intent

    @property
    def name(self) -> str:
        return self._intent.name

    @property
    def key(self) -> str:
        return self._intent.key

    @property
    def answer(self) -> Answer | None:
        """The answer that the jar has from before; None: there is none yet."""
        return self._intent.answer

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        with self._intent.current():
            return self._client.request(method, url, **options)

    def post(self, url: str, **options: Any) -> httpx.Response:
        return self.request("POST", url, **options)

    def put(self, url: str, **options: Any) -> httpx.Response:
        return self.request("PUT", url, **options)

    def patch(self, url: str, **options: Any) -> httpx.Response:
        return self.request("PATCH", url, **options)

    def delete(self, url: str, **options: Any) -> httpx.Response:
        return self.request("DELETE", url, **options)


class Client(ClientBase):
    """``key_lifetime``: how long the server keeps a key, if it never says so with Idempotency-Expires; see ``KeyJar``.
    ``transport`` is what really sends. Other ``options`` go to ``httpx.Client``: headers, auth, timeout, cookies.

    It sends to the server of ``base_url`` only: a whole URL of another origin is refused.
    """

    def __init__(
        self,
        base_url: str,
        *,
        jar: str | KeyJar | None = None,
        account: str = "",
        key_lifetime: timedelta | None = None,
        budget: Budget | None = None,
        spelling: Spelling = "bare",
        header: str = "Idempotency-Key",
        rules: Rules | None = None,
        transport: httpx.BaseTransport | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            base_url,
            jar=jar,
            account=account,
            key_lifetime=key_lifetime,
            budget=budget,
            spelling=spelling,
            header=header,
            rules=rules,
        )
        network = network_options(base_url, options, given=transport is not None)
        inner = IdempotentTransport(transport or httpx.HTTPTransport(**network), rules=self.rules)
        self.http = httpx.Client(base_url=base_url, transport=inner, **options)

    @contextmanager
    def intent(self, name: str, *, key: str | None = None, again: bool = False) -> Iterator[ClientIntent]:
        """The operation with this name of yours. The request in the block is sent under its key, which is on disk."""
        with self.jar.intent(name, key=key, again=again) as intent:
            yield ClientIntent(self, intent)

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        self.check_origin(url)
        return self.http.request(method, url, **options)

    def get(self, url: str, **options: Any) -> httpx.Response:
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Any) -> httpx.Response:
        return self.request("POST", url, **options)

    def put(self, url: str, **options: Any) -> httpx.Response:
        return self.request("PUT", url, **options)

    def patch(self, url: str, **options: Any) -> httpx.Response:
        return self.request("PATCH", url, **options)

    def delete(self, url: str, **options: Any) -> httpx.Response:
        return self.request("DELETE", url, **options)

    def resume(
        self,
        name: str | None = None,
        *,
        again: bool = False,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        """Send every open intent of this account and this server, or the one with this name.

        An intent whose key the server may have forgotten is not sent without ``again``: IntentExpired names them, after
        the others are done, and has the ``outcomes`` of all. Credentials come from this client, and go only to its own
        origin.
        """
        work = self._resumption(name, again)
        for row in work.rows:
            outcome = work.skipped(row)
            if outcome is None:
                time.sleep(work.wait(row))
                outcome = self._finish(row, again)
            work.add(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
        return work.end()

    def _finish(self, row: Row, again: bool) -> Outcome:
        request = row.request
        try:
            with self.intent(row.name, again=again) as intent:
                response = intent.request(
                    request.method, request.url, headers=list(request.headers), content=request.body
                )
        except Exception as error:  # noqa: BLE001 - one intent's trouble must not keep the others
            return result_of(self.jar, row, error=error)
        return result_of(self.jar, row, status=response.status_code)

    def close(self) -> None:
        self.http.close()
        self._close_jar()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncClientIntent:
    """As ``ClientIntent``."""

    def __init__(self, client: AsyncClient, intent: Intent) -> None:
        self._client = client
        self._intent = intent

    @property
    def name(self) -> str:
        return self._intent.name

    @property
    def key(self) -> str:
        return self._intent.key

    @property
    def answer(self) -> Answer | None:
        return self._intent.answer

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        with self._intent.current():
            return await self._client.request(method, url, **options)

    async def post(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("POST", url, **options)

    async def put(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("PUT", url, **options)

    async def patch(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("PATCH", url, **options)

    async def delete(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("DELETE", url, **options)


class AsyncClient(ClientBase):
    """As ``Client``, on ``httpx.AsyncClient``. The jar waits for the disk in threads."""

    def __init__(
        self,
        base_url: str,
        *,
        jar: str | KeyJar | None = None,
        account: str = "",
        key_lifetime: timedelta | None = None,
        budget: Budget | None = None,
        spelling: Spelling = "bare",
        header: str = "Idempotency-Key",
        rules: Rules | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            base_url,
            jar=jar,
            account=account,
            key_lifetime=key_lifetime,
            budget=budget,
            spelling=spelling,
            header=header,
            rules=rules,
        )
        network = network_options(base_url, options, given=transport is not None)
        inner = AsyncIdempotentTransport(transport or httpx.AsyncHTTPTransport(**network), rules=self.rules)
        self.http = httpx.AsyncClient(base_url=base_url, transport=inner, **options)

    @asynccontextmanager
    async def intent(
        self, name: str, *, key: str | None = None, again: bool = False
    ) -> AsyncIterator[AsyncClientIntent]:
        found = await anyio.to_thread.run_sync(lambda: self.jar.find(name, key=key, again=again))
        with entered(found) as intent:
            yield AsyncClientIntent(self, intent)

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        self.check_origin(url)
        return await self.http.request(method, url, **options)

    async def get(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("GET", url, **options)

    async def post(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("POST", url, **options)

    async def put(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("PUT", url, **options)

    async def patch(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("PATCH", url, **options)

    async def delete(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("DELETE", url, **options)

    async def resume(
        self,
        name: str | None = None,
        *,
        again: bool = False,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        """As ``Client.resume``."""
        work = await anyio.to_thread.run_sync(lambda: self._resumption(name, again))
        for row in work.rows:
            outcome = work.skipped(row)
            if outcome is None:
                await anyio.sleep(work.wait(row))
                outcome = await self._finish(row, again)
            work.add(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
        return work.end()

    async def _finish(self, row: Row, again: bool) -> Outcome:
        request = row.request
        error: Exception | None = None
        status: int | None = None
        try:
            async with self.intent(row.name, again=again) as intent:
                response = await intent.request(
                    request.method, request.url, headers=list(request.headers), content=request.body
                )
            status = response.status_code
        except Exception as caught:  # noqa: BLE001 - one intent's trouble must not keep the others
            error = caught
        return await anyio.to_thread.run_sync(lambda: result_of(self.jar, row, status=status, error=error))

    async def aclose(self) -> None:
        await self.http.aclose()
        self._close_jar()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
