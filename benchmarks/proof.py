"""Before anything is measured: does this contestant do what it is measured for?

One key, several requests, each on a new connection (so that several processes get some of them): all answers must be
the same, byte for byte, and the handler must have run once. The bare app must have run as often as it was asked.
"""

from __future__ import annotations

import http.client
import json
import uuid

from benchmarks.contestants import Contestant
from benchmarks.load import BODY
from benchmarks.serving import Served, Server

REQUESTS = 8


class NotProven(Exception):
    """It is not idempotent, or not always: measuring it would compare two different things."""


def prove(contestant: Contestant, served: Served, server: Server) -> str:
    """One sentence about what was seen; NotProven when it is not what was asked for."""
    before = executions(served)
    key = str(uuid.uuid4())
    answers = [_pay(served, key) for _ in range(REQUESTS)]
    ran = executions(served) - before
    if bad := [status for status, _ in answers if status != 201]:
        raise NotProven(f"answered {bad[0]} instead of 201")
    distinct = len({body for _, body in answers})
    if contestant.store is None:
        if distinct != REQUESTS:
            raise NotProven(f"the bare app gave {distinct} answers to {REQUESTS} requests")
        return f"{REQUESTS} requests with one key: {distinct} answers, as it has no guard"
    if distinct != 1:
        raise NotProven(f"{REQUESTS} requests with one key got {distinct} different answers")
    if server == "uvicorn x 4":  # each process counts for itself; its numbers are in the answers
        return f"{REQUESTS} requests with one key: one answer"
    if ran != 1:
        raise NotProven(f"{REQUESTS} requests with one key were executed {ran} times")
    return f"{REQUESTS} requests with one key: one answer, 1 execution"


def executions(served: Served) -> int:
    """How often the handler has run, as its process says."""
    status, body = _ask(served, "GET", "/executions", None, {})
    if status != 200:
        raise NotProven(f"GET /executions answered {status}")
    return int(json.loads(body)["executions"])


def _pay(served: Served, key: str) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{key}"', "Authorization": "Bearer tenant-a"}
    return _ask(served, "POST", "/payments", BODY, headers)


def _ask(served: Served, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
