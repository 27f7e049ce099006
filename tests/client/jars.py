"""What the tests of the key jar share."""

from __future__ import annotations

from typing import Any

import httpx

from oncekey.client import Budget, Client, KeyJar
from tests.client.server import Reply, Server

OK = Reply(201, b'{"id": 1}', (("Content-Type", "application/json"),))
DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def client_of(server: Server, jar: KeyJar, **options: Any) -> Client:
    transport = httpx.HTTPTransport(verify=False)
    return Client(server.url, jar=jar, transport=transport, budget=Budget(tries=1, seconds=5), **options)
