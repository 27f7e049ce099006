"""How many instructions a request takes: ``python -m benchmarks.instructions``, about 2 minutes.

Rates on a shared machine differ by a third from one minute to the next, and instructions by one in a hundred: this is
for comparing two versions of a line. The app of ``apps.py`` stands behind uvicorn's own protocol, without sockets, with
32 requests under way at a time and a real PostgreSQL, and valgrind (which must be installed) counts. A short run and a
long one: what they differ by is the requests', without the start.

It is no time: the kernel, waiting, and what misses the caches are not in it. Replays go round 1,000 keys, each with a
``Location`` of its own as real ones have: with a few keys, whatever remembers responses would look better than it is.

``fractions`` is no request: it is the fingerprint of one MiB of ``1.0,``, which once took half a second, beside
``parsing``, what the standard library takes to read it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from typing import Any

from benchmarks import apps, load
from benchmarks.places import places
from benchmarks.serving import ROOT, child_environment

MODES = ("bare", "replay", "first", "parsing", "fractions")
DOCUMENTS = ("parsing", "fractions")
AT_ONCE = 32
KEYS = 1_000
SHORT, LONG = 8 * AT_ONCE, 72 * AT_ONCE
FEW, MORE = 1, 4
"""Of documents, each of which takes as much as hundreds of requests."""
BODY = load.BODY.encode()
REQUEST = (
    b"POST /payments HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAuthorization: Bearer tenant-a\r\n"
    b"Content-Type: application/json\r\nContent-Length: " + b"%d" % len(BODY) + b"\r\n%s\r\n"
)
_COUNTED = re.compile(r"Collected : (\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(MODES)}; all of them where none is named")
    asked = parser.parse_args().modes or MODES
    if unknown := set(asked) - set(MODES):
        parser.error(f"{', '.join(sorted(unknown))}: it takes {', '.join(MODES)}")
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: it is what counts. Install it with your system's packages")
    with places({"postgres"}) as at:
        if "postgres" not in at.urls:
            raise SystemExit(f"PostgreSQL cannot run here: {at.missing['postgres']}")
        counted: dict[str, float] = {}
        for mode in [mode for mode in MODES if mode in asked]:
            few, more = (FEW, MORE) if mode in DOCUMENTS else (SHORT, LONG)
            short, long = (_count(mode, number, at.urls["postgres"]) for number in (few, more))
            counted[mode] = (long - short) / (more - few)
            beside = "parsing" if mode in DOCUMENTS else "bare"
            part = f"   {beside} / {mode} {counted[beside] / counted[mode]:.2f}" if beside in counted else ""
            what = "document" if mode in DOCUMENTS else "request"
            print(f"{mode:9} {counted[mode]:13,.0f} instructions a {what}{part}", flush=True)


def _count(mode: str, number: int, url: str) -> int:
    program = f"from benchmarks.instructions import serve; serve({mode!r}, {number}, {url!r})"
    ended = subprocess.run(
        ["valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}", sys.executable, "-c", program],
        check=False,
        cwd=ROOT,
        env=child_environment() | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = _COUNTED.search(ended.stderr)
    if ended.returncode or found is None:
        raise SystemExit(f"the run under valgrind failed:\n{ended.stderr[-4000:]}")
    return int(found[1])


def serve(mode: str, number: int, url: str) -> None:
    """Answer so many requests of this mode in this process, on uvloop; or read so many documents."""
    if mode in DOCUMENTS:
        _read(mode, number)
        return
    import uvloop

    uvloop.run(_serve(mode, number, url))


def _read(mode: str, number: int) -> None:
    from oncekey.core.fingerprint import fingerprint

    body = b"[" + b"1.0," * (2**18 - 1) + b"1]"
    for _ in range(number):
        if mode == "parsing":
            json.loads(body)
        else:
            fingerprint(method="POST", path="/payments", query=b"", content_type="application/json", body=body)


async def _serve(mode: str, number: int, url: str) -> None:
    from uvicorn.config import Config

    from oncekey import SINGLE_TENANT, OnceKey
    from oncekey.web import tuning
    from oncekey.web.asgi import IdempotencyMiddleware

    app = apps.starlette_app()
    once = None
    if mode != "bare":
        once = OnceKey(url, scope=SINGLE_TENANT, migrate=True)
        app.add_middleware(IdempotencyMiddleware, once=once)
    config = Config(app, access_log=False, log_level="warning")
    config.load()
    run = uuid.uuid4().hex[:24]
    keys = [f"{run}{n:012x}".encode() for n in range(KEYS + number)]
    await _load(config, iter(keys[:KEYS]), mode)
    tuning.settle()
    await _load(config, iter(keys[KEYS:]) if mode == "first" else islice(cycle(keys[:KEYS]), number), mode)
    if once is not None:
        await once.aclose()


async def _load(config: Any, keys: Iterator[bytes], mode: str) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(_client(config, keys, mode))


async def _client(config: Any, keys: Iterator[bytes], mode: str) -> None:
    """One connection: the next request when the last is answered."""
    from uvicorn.server import ServerState

    loop = asyncio.get_running_loop()
    protocol, wire = _protocol()(config, ServerState(), {}), _Wire()
    protocol.connection_made(wire)
    head = REQUEST % (b"" if mode == "bare" else b'Idempotency-Key: "%s"\r\n')
    for key in keys:
        protocol.answered = loop.create_future()
        protocol.data_received((head if mode == "bare" else head % key) + BODY)
        await protocol.answered
        answer = b"".join(wire.sent)
        wire.sent.clear()
        if not answer.startswith(b"HTTP/1.1 201 "):
            raise RuntimeError(f"not the answer that was asked for: {answer[:500]!r}")
    protocol.connection_lost(None)


@cache
def _protocol() -> Any:
    """One class for all connections, as in a server: Python is quicker where it meets the same one again."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Protocol(HttpToolsProtocol):
        answered: asyncio.Future[None]

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.answered.set_result(None)

    return Protocol


class _Wire(asyncio.Transport):
    """A connection without a network: keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5000), "sockname": ("127.0.0.1", 8000)})
        self.sent: list[bytes] = []

    def write(self, data: Any) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    main()
