"""The payment provider of the campaign: a process of its own, with a ledger on disk that nothing takes back.

It honours keys (a call under a known downstream key finds the first charge) or does not, as each call says. A line is
in the ledger before the call is answered. Every call is written down, also those that found what was there already, so
that the history of a key can be printed. One JSON line each way over TCP; no driver, and quick.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the ledger."""

    id: str
    scope: str
    key: str
    """The client's, so that the ledger can be compared without knowing how downstream keys are made."""
    what: str
    downstream_key: str
    attempt: int
    at: float
    new: bool
    """A charge was made. Otherwise the one under this downstream key was found."""


def serve(path: str, fd: int) -> None:
    """The process; it takes up its ledger where it was left."""
    asyncio.run(_serve(Path(path), socket.socket(fileno=fd)))


async def _serve(path: Path, listener: socket.socket) -> None:
    known = {call.downstream_key: call.id for call in reversed(read(path)) if call.new}
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = len(known)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        while line := await reader.readline():
            asked = json.loads(line)
            if asked.pop("question", False):
                writer.write(json.dumps({"id": known.get(asked["downstream_key"])}).encode() + b"\n")
                continue
            honours, slow = asked.pop("honours"), asked.pop("slow", 0.0)
            found = known.get(asked["downstream_key"]) if honours else None
            if found is None:
                number += 1
            call = Call(found or f"ch_{number:06d}", **asked, at=time.time(), new=found is None)
            known.setdefault(call.downstream_key, call.id)
            os.write(file, json.dumps(asdict(call)).encode() + b"\n")
            if slow:
                await asyncio.sleep(slow)
            writer.write(json.dumps({"id": call.id}).encode() + b"\n")
        writer.close()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except OSError:
            writer.close()  # the process that asked was killed: that is what the campaign is about

    server = await asyncio.start_server(quietly, sock=listener)
    await server.serve_forever()


def read(path: Path) -> list[Call]:
    """All whole lines: the last one, cut short by a kill, was never reported."""
    if not path.exists():
        return []
    return [Call(**json.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]


class Teller:
    """The app's way to the provider: one connection for each call. OSError: it is not known whether it was charged."""

    def __init__(self, port: int, *, slow: float = 0.0) -> None:
        self.port = port
        self.slow = slow

    async def charge(self, scope: str, key: str, what: str, downstream_key: str, attempt: int, *, honours: bool) -> str:
        charge: str = await self._ask(
            scope=scope, key=key, what=what, downstream_key=downstream_key, attempt=attempt, honours=honours,
            slow=self.slow,
        )  # fmt: skip
        return charge

    async def known(self, downstream_key: str) -> str | None:
        """The charge under this downstream key, where one was made."""
        charge: str | None = await self._ask(question=True, downstream_key=downstream_key)
        return charge

    async def _ask(self, **asked: Any) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(json.dumps(asked).encode() + b"\n")
            line = await reader.readline()
        finally:
            writer.close()
        if not line:
            raise ConnectionResetError("the provider hung up")
        return json.loads(line)["id"]
