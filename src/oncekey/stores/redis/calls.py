"""Runs scripts: one round trip per server for a batch, each call under one deadline.

Every thread has connections of its own, one to each server. A script that a server does not know (NOSCRIPT: it was
restarted, or took over) is sent again as text; a slot that moved (MOVED) is looked up again. In both cases the server
did nothing the first time. Nothing else is repeated here: the lanes do that, and owner tokens show what happened.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from oncekey.errors import OnceKeyError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.redis.batches import Call
from oncekey.stores.redis.connection import Command, Link, Lost, connect, explain
from oncekey.stores.redis.nodes import Nodes
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.redis.scripts import END
from oncekey.stores.redis.servers import ASKED
from oncekey.stores.redis.urls import Address, Settings
from oncekey.stores.redis.watch import ServerWatch

_ROUNDS = 4
"""How many times a call is sent at most: again with the script's text if the server does not have the script, and again
to another server if the bucket has moved."""
PAUSE_SECONDS = 1.0
"""After one server of several has failed, calls to it fail at once for this long."""


class PartlyUnavailable(StoreError):
    """Some servers answered, and one did not. Asked one by one, the rows of the others succeed."""


class Paused(Lost):
    """No connection was tried: the server failed less than ``PAUSE_SECONDS`` ago."""


class Calls:
    """The connections of a store."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.where = settings.where
        self.nodes = Nodes(settings)
        self.watch = ServerWatch(settings)
        self._local = threading.local()
        self._open: weakref.WeakSet[Link] = weakref.WeakSet()
        self._inherited: list[object] = []
        self._failed: dict[Address, float] = {}
        self.together: bool | None = False if settings.kind == "cluster" else None
        """Whether one script may touch several buckets; None: not known yet (``Epochs``)."""
        self._pid = os.getpid()

    # -- scripts -------------------------------------------------------------------------------------------------

    def run(self, calls: Sequence[Call], deadline: float, *, confirmed: bool) -> list[Any]:
        """The replies, in the order of the calls. ``confirmed``: as many replicas as the URL asks for have all that
        these calls wrote or read; otherwise this raises StoreUnavailable, after the servers did it."""
        replies: list[Any] = [None] * len(calls)
        as_text: set[int] = set()
        left = list(range(len(calls)))
        for _ in range(_ROUNDS):
            self._round(calls, left, as_text, replies, deadline, confirmed=confirmed)
            again = []
            for number in left:
                match replies[number]:
                    case Refusal(code="NOSCRIPT"):
                        as_text.add(number)
                        again.append(number)
                    case Refusal(code="MOVED"):
                        self.nodes.forget()
                        again.append(number)
            left = again
            if not left:
                break
        for reply in replies:
            if isinstance(reply, Refusal):
                if reply.code in ("READONLY", "CLUSTERDOWN", "MASTERDOWN", "MOVED"):
                    self.nodes.forget()
                    self.disconnect()
                elif reply.code == "CROSSSLOT":
                    self.together = None  # another kind of server took over: ask it again
                raise self.refused(reply)
        return replies

    def refused(self, refusal: Refusal) -> OnceKeyError:
        return explain(refusal, self.where)

    def _round(
        self,
        calls: Sequence[Call],
        numbers: Sequence[int],
        as_text: set[int],
        replies: list[Any],
        deadline: float,
        *,
        confirmed: bool,
    ) -> None:
        """Send these calls, each to its server, and read the replies: first all sends, then all reads."""
        by_server: dict[Address, list[int]] = {}
        trouble: Exception | None = None
        try:
            for number in numbers:
                by_server.setdefault(self.nodes.of(calls[number].bucket, deadline), []).append(number)
        except Lost as error:
            raise self.lost(error) from error
        wait = [self.wait_command()] if confirmed and self.settings.replicas else []
        sent: list[tuple[Link, list[int], tuple[Command, ...]]] = []
        for address, theirs in by_server.items():
            scripts = [command(calls[number], as_text=number in as_text) for number in theirs]
            try:
                link = self.link(address, deadline)
                look = self.watch.due(address)
                link.send([*scripts, *look, *wait], deadline)
                sent.append((link, theirs, look))
            except (Lost, Refusal, OnceKeyError) as error:
                trouble = self._failure(address, error)
        answered = 0
        for link, theirs, look in sent:
            try:
                answers = link.receive(len(theirs) + len(look) + len(wait), deadline)
            except Lost as error:
                trouble = self._failure(link.address, error)
                continue
            answered += 1
            for number, answer in zip(theirs, answers, strict=False):
                replies[number] = answer
            if wait and trouble is None:
                trouble = self._short(answers[-1])
            if look and (sentence := self.looked(link.address, [calls[number] for number in theirs], answers)):
                trouble = SchemaError(sentence)
        if trouble is not None:
            if answered and len(by_server) > 1 and isinstance(trouble, StoreUnavailable):
                raise PartlyUnavailable(str(trouble)) from trouble
            raise trouble

    def looked(self, address: Address, calls: Sequence[Call], answers: Sequence[Any]) -> str | None:
        """Why the answers of these calls do not count, from what stands behind them (``ServerWatch.due``).

        The end of a request counts always: it is stored, and makes no key look new. The next call is refused.
        """
        refused = self.watch.answered(address, answers[len(calls) : len(calls) + len(ASKED)])
        return None if all(call.script is END for call in calls) else refused

    def wait_command(self) -> Command:
        """It follows the scripts of a batch, on the same connection."""
        milliseconds = max(1, round(self.settings.replicas_timeout * 1000))
        return (b"WAIT", b"%d" % self.settings.replicas, b"%d" % milliseconds)

    def _short(self, confirmed: Any) -> Exception | None:
        if isinstance(confirmed, Refusal):
            return self.refused(confirmed)
        if confirmed >= self.settings.replicas:
            return None
        return StoreUnavailable(
            f"{self.where}: {confirmed} of {self.settings.replicas} replicas confirmed the write within "
            f"{self.settings.replicas_timeout:g} s, so it does not count"
        )

    def _failure(self, address: Address, error: Exception) -> Exception:
        if (link := self._local.links.pop(address, None)) is not None:
            link.close()
        self.nodes.forget()
        if self.settings.kind == "cluster" and not isinstance(error, Paused):  # a pause does not prolong itself
            self._failed[address] = time.monotonic() + PAUSE_SECONDS
        match error:
            case Lost():
                return self.lost(error)
            case Refusal():
                return self.refused(error)
        return error

    def lost(self, error: Lost) -> StoreUnavailable:
        return StoreUnavailable(f"{self.where} {error}")

    # -- connections ---------------------------------------------------------------------------------------------

    def ask_each(self, commands: Sequence[Command], deadline: float) -> dict[Address, list[Any]]:
        """Send commands to every server that has a bucket. It does not check first whether a server may be used."""
        with self.troubles():
            return {
                address: self._plain_link(address, deadline).ask(commands, deadline)
                for address in self.nodes.all(deadline)
            }

    def ask_of(self, commands: Sequence[tuple[int, Command]], deadline: float) -> list[Any]:
        """Send each command to the server of its bucket. Raises if one is refused."""
        answers: list[Any] = [None] * len(commands)
        with self.troubles():
            by_server: dict[Address, list[int]] = {}
            for number, (bucket, _) in enumerate(commands):
                by_server.setdefault(self.nodes.of(bucket, deadline), []).append(number)
            for address, theirs in by_server.items():
                link = self._plain_link(address, deadline)
                asked = link.ask([commands[number][1] for number in theirs], deadline)
                for number, answer in zip(theirs, asked, strict=True):
                    answers[number] = answer
            for answer in answers:
                if isinstance(answer, Refusal):
                    raise answer
        return answers

    @contextmanager
    def troubles(self) -> Iterator[None]:
        """Failures of a connection, and refusals, as oncekey's errors."""
        try:
            yield
        except (Lost, Refusal) as error:
            self.nodes.forget()
            self.disconnect()
            raise (self.lost(error) if isinstance(error, Lost) else self.refused(error)) from error

    def link(self, address: Address, deadline: float) -> Link:
        """This thread's connection to a server that has been checked (:meth:`check_server`)."""
        link = self._plain_link(address, deadline)
        if not self.watch.may_use(link):
            refusals = self.watch.refusals(address)
            self.check_server(link, deadline)
            link.checked_at = refusals
        return link

    def check_server(self, link: Link, deadline: float) -> None:
        """Raise if this server may not be used. A subclass has the rule."""

    def open_checked(self, address: Address, deadline: float) -> Link:
        """A connection of its own, for an event loop."""
        link = connect(address, self.settings.options, deadline)
        link.checked_at = self.watch.refusals(address)
        try:
            self.check_server(link, deadline)
        except BaseException:
            link.close()
            raise
        return link

    def _plain_link(self, address: Address, deadline: float) -> Link:
        links = self._links()
        link = links.get(address)
        if link is None or link.closed:
            if self._failed.get(address, 0.0) > time.monotonic():
                raise Paused("is unavailable: one of its nodes failed a moment ago")
            links[address] = link = connect(address, self.settings.options, deadline)
            self._failed.pop(address, None)
            self._open.add(link)
        return link

    def _links(self) -> dict[Address, Link]:
        local = self._local
        if getattr(local, "pid", None) != os.getpid():
            if self._pid != os.getpid():
                # A forked child keeps its parent's sockets referenced, and never uses or closes them.
                self._inherited += [list(self._open), self._local.__dict__.get("links")]
                self._open = weakref.WeakSet()
                self._pid = os.getpid()
            local.links, local.pid = {}, os.getpid()
        links: dict[Address, Link] = local.links
        return links

    def disconnect(self) -> None:
        """Close the connections of this thread."""
        links = self._links()
        for link in links.values():
            link.close()
        links.clear()

    def close(self) -> None:
        """Close the connections of all threads."""
        if self._pid == os.getpid():
            for link in list(self._open):
                with suppress(OSError):
                    link.close()


def command(call: Call, *, as_text: bool = False) -> Command:
    what = (b"EVAL", call.script.text) if as_text else (b"EVALSHA", call.script.sha)
    return (*what, b"%d" % len(call.keys), *call.keys, *call.values)
