"""One way to send for the tests, by each library: httpx (sync, async), requests, aiohttp."""

from __future__ import annotations

import asyncio
import json as json_text
import ssl
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import requests

from oncekey.client import KeyJar, Rules
from oncekey.client.aiohttp import IdempotentSession
from oncekey.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from oncekey.client.requests import IdempotentAdapter


@dataclass
class Got:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        return json_text.loads(self.body)


PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""No TLS is used here, and to load the certificates takes longer than a test."""


class NoWait:
    """Sleeps that only remember how long they should be."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def later(self, seconds: float) -> None:
        self.waits.append(seconds)


Send = Callable[..., Got]


def by_httpx(rules: Rules, wait: NoWait, jar: KeyJar | None, method: str, url: str, **options: Any) -> Got:
    intent, timeout, follow = options.pop("intent", None), options.pop("timeout", 5.0), options.pop("follow", False)
    transport = IdempotentTransport(httpx.HTTPTransport(verify=PLAIN), rules=rules, sleep=wait)
    with httpx.Client(transport=transport, follow_redirects=follow) as client:
        with jar.intent(intent) if jar and intent else nullcontext():
            response = client.request(method, url, timeout=timeout, **options)
        return Got(response.status_code, response.content, dict(response.headers))


def by_async_httpx(rules: Rules, wait: NoWait, jar: KeyJar | None, method: str, url: str, **options: Any) -> Got:
    intent, timeout, follow = options.pop("intent", None), options.pop("timeout", 5.0), options.pop("follow", False)

    async def ask() -> Got:
        inner = httpx.AsyncHTTPTransport(verify=PLAIN)
        transport = AsyncIdempotentTransport(inner, rules=rules, sleep=wait.later)
        async with httpx.AsyncClient(transport=transport, follow_redirects=follow) as client:
            with jar.intent(intent) if jar and intent else nullcontext():
                response = await client.request(method, url, timeout=timeout, **options)
            return Got(response.status_code, response.content, dict(response.headers))

    return asyncio.run(ask())


def by_requests(rules: Rules, wait: NoWait, jar: KeyJar | None, method: str, url: str, **options: Any) -> Got:
    intent, follow = options.pop("intent", None), options.pop("follow", False)
    if "content" in options:
        options["data"] = options.pop("content")
    options.setdefault("timeout", 5.0)
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", IdempotentAdapter(rules=rules, sleep=wait))
        with jar.intent(intent) if jar and intent else nullcontext():
            response = session.request(method, url, allow_redirects=follow, **options)
        return Got(response.status_code, response.content, {n.lower(): t for n, t in response.headers.items()})


def by_aiohttp(rules: Rules, wait: NoWait, jar: KeyJar | None, method: str, url: str, **options: Any) -> Got:
    intent = options.pop("intent", None)
    options.pop("follow", None)
    if "content" in options:
        options["data"] = options.pop("content")
    options["timeout"] = aiohttp.ClientTimeout(total=options.pop("timeout", 5.0))

    async def ask() -> Got:
        async with aiohttp.ClientSession() as session:
            api = IdempotentSession(session, rules=rules, sleep=wait.later)
            with jar.intent(intent) if jar and intent else nullcontext():
                answer = await api.request(method, url, **options)
            return Got(answer.status, answer.body, dict(answer.headers))

    return asyncio.run(ask())


LIBRARIES = {"httpx": by_httpx, "httpx-async": by_async_httpx, "requests": by_requests, "aiohttp": by_aiohttp}
NETWORK_ERRORS = (httpx.TransportError, requests.RequestException, aiohttp.ClientError, TimeoutError)
