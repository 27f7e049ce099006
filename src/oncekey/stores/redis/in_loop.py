"""Reserve and swap in the caller's event loop: the store's own scripts, without a thread.

The loop sends the scripts of a batch itself, and serves other requests until the answers are there. A connection is
opened in a thread, and then read by the loop. This module handles only success. After any error it raises and closes
its connections. The tickets then go to a lane's thread, which handles the error (``engine/batching/loop_lane.py``): a
server that is gone, a slot that moved, an epoch that is missing, replicas that do not confirm.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.redis import batches
from oncekey.stores.redis.batches import Call
from oncekey.stores.redis.calls import command
from oncekey.stores.redis.connection import Command, Link, Lost
from oncekey.stores.redis.protocol import Refusal, Replies, pack
from oncekey.stores.redis.scripts import END, RESERVE
from oncekey.stores.redis.urls import Address

if TYPE_CHECKING:
    from oncekey.stores.redis.store import RedisStore

_LOAD: tuple[Command, ...] = tuple((b"SCRIPT", b"LOAD", script.text) for script in (RESERVE, END))


class InLoop:
    """The connections of one event loop, one to each server."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._wires: dict[Address, _Wire] = {}
        self._pid = os.getpid()

    async def reserve(self, batch: Sequence[Reservation]) -> list[float | Record]:
        asked = batches.reserve_calls(self._store.way(confirmed=True), batch)
        return batches.found(batch, asked, await self._ask(asked))

    async def swap(self, batch: Sequence[End | Swap]) -> list[float | None]:
        asked = batches.end_calls(self._store.way(confirmed=True), batch)
        return batches.times(len(batch), asked, await self._ask(asked))

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[list[float | Record], list[float | None]]:
        # Swaps come first, so that a reservation of the same key finds the response.
        way = self._store.way(confirmed=True)
        ending, beginning = batches.end_calls(way, ends), batches.reserve_calls(way, begins)
        replies = await self._ask([*ending, *beginning])
        moved = batches.times(len(ends), ending, replies[: len(ending)])
        return batches.found(begins, beginning, replies[len(ending) :]), moved

    async def _ask(self, asked: Sequence[Call]) -> list[Any]:
        """The replies, in the order of the calls. One round trip to each server."""
        store = self._store
        deadline = time.monotonic() + store.settings.timeout
        wait = [store.calls.wait_command()] if store.settings.replicas else []
        by_server: dict[Address, list[int]] = {}
        for number, call in enumerate(asked):
            by_server.setdefault(store.calls.nodes.known(call.bucket), []).append(number)
        found: list[Any] = [None] * len(asked)
        try:
            wires = [await self._wire(address, deadline) for address in by_server]
            looks = [store.calls.watch.due(address) for address in by_server]
            for wire, theirs, look in zip(wires, by_server.values(), looks, strict=True):
                wire.send([*(command(asked[number]) for number in theirs), *look, *wait])
            for wire, theirs, look in zip(wires, by_server.values(), looks, strict=True):
                replies = await wire.receive(len(theirs) + len(look) + len(wait), deadline)
                if wait and (isinstance(replies[-1], Refusal) or replies[-1] < store.settings.replicas):
                    raise StoreUnavailable("the replicas did not confirm the batch in time")
                for number, reply in zip(theirs, replies, strict=False):
                    if isinstance(reply, Refusal):
                        raise StoreUnavailable(f"Redis refused a script ({reply.code})")
                    found[number] = reply
                if look and store.calls.looked(wire.link.address, [asked[number] for number in theirs], replies):
                    raise StoreUnavailable("Redis evicts keys, or has evicted some")
        except BaseException:
            # Also when cancelled or timed out: the answer may still arrive, and the next batch must not read it.
            self.abandon()
            raise
        return found

    async def _wire(self, address: Address, deadline: float) -> _Wire:
        wire = self._wires.get(address)
        if wire is not None and (wire.dead or not self._store.calls.watch.may_use(wire.link)):
            # The server closed it between two batches, and has nothing of this one; or it must be checked again.
            self._wires.pop(address).close()
            wire = None
        if wire is None:
            link = await asyncio.to_thread(self._connect, address, deadline)
            wire = self._wires[address] = _Wire(link)
        return wire

    def _connect(self, address: Address, deadline: float) -> Link:
        try:
            link = self._store.calls.open_checked(address, deadline)
            link.ask(_LOAD, deadline)
        except Lost as error:
            raise self._store.calls.lost(error) from error
        except Refusal as error:
            raise self._store.calls.refused(error) from error
        return link

    def abandon(self) -> None:
        """Drop the connections. Any thread may call this while no verb runs; the next verb opens others."""
        wires, self._wires = self._wires, {}
        if self._pid == os.getpid():
            for wire in wires.values():
                wire.close()


class _Wire:
    """A connection that the running loop reads."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._loop = asyncio.get_running_loop()
        self._sock = link.socket
        self._sock.setblocking(False)
        self._replies = Replies()
        self._unsent = b""
        self._count = 0
        self.dead = False
        """The connection failed while no batch waited for it."""
        self._answer: asyncio.Future[list[Any]] | None = None
        self._loop.add_reader(self._sock, self._read)

    def send(self, commands: Sequence[Command]) -> None:
        self._unsent = pack(commands)
        self._write()
        if self._unsent:
            self._loop.add_writer(self._sock, self._write)

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)  # the reader sees the same failure
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    async def receive(self, count: int, deadline: float) -> list[Any]:
        self._count = count
        self._answer = self._loop.create_future()
        timer = self._loop.call_later(max(0.001, deadline - time.monotonic()), self._time_out)
        try:
            self._deliver()
            return await self._answer
        finally:
            timer.cancel()
            self._answer = None

    def _read(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return None
        except OSError as error:
            return self._fail(error)
        if not data:
            return self._fail(ConnectionResetError())
        self._replies.feed(data)
        return self._deliver()

    def _deliver(self) -> None:
        if self._answer is not None and not self._answer.done():
            try:
                replies = self._replies.take(self._count)
            except ValueError as error:
                self._fail(error)
            else:
                if replies is not None:
                    self._answer.set_result(replies)

    def _time_out(self) -> None:
        self._read()  # if the loop was busy, the answer may have arrived
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        self._loop.remove_reader(self._sock)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StoreUnavailable(f"the connection to Redis failed ({type(error).__name__})"))
        self.dead = True

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self.link.close()
