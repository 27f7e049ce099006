"""A client process that is killed: it sends every intent that has no answer yet, and ends when all have one.

``python -m tests.client.sender URL JAR COUNT THREADS``. It keeps no state but the jar. Every second run begins with
``resume()``, as an app would at its start.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from oncekey.client import Budget, Client
from oncekey.errors import ClientError


def main(url: str, jar: str, count: int, threads: int) -> int:
    budget = Budget(tries=8, seconds=20.0, first_wait=0.02, longest_wait=1.5)
    with Client(url, jar=jar, budget=budget, timeout=5.0, transport=httpx.HTTPTransport(verify=False)) as client:
        if len(client.jar.finished()) % 2:
            client.resume()

        def send(number: int) -> bool:
            try:
                with client.intent(f"order-{number}") as intent:
                    response = intent.post("/orders", json={"name": f"order-{number}"})
            except (httpx.TransportError, ClientError):
                return False
            return response.status_code == 201 and response.json()["name"] == f"order-{number}"

        with ThreadPoolExecutor(threads) as pool:
            return 0 if all(list(pool.map(send, range(count)))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
