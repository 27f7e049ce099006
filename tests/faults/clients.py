"""Clients that retry by the rules of docs/client.md, and the history of every attempt they made.

The same key again after a lost connection, a timeout, 5xx, 408, 425, 429, and 409 with Retry-After; after 202 too,
which asks to come again. Never after another 4xx: that is final. A 409 that says ``outcome-unknown`` ends it, unless
a reconciler or an operator settles it (``waits_for_unknown``). They do not wait as long as Retry-After says:
the impatient client is the harder one.

An answer counts when it came twice: the second one is the replay, and must be the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Name = tuple[str, str]
"""(scope, key): whose key it is, and the key."""
Outcome = Literal["open", "final", "unknown", "stuck"]

RETRIED = frozenset({202, 408, 425, 429})
UNKNOWN = b"outcome-unknown"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, the same in every attempt."""

    kind: str
    """The route: ``POST /{kind}``."""
    key: str
    cents: int = 100
    scope: str = "acme"
    also: tuple[tuple[str, Any], ...] = ()
    """Further members of the body."""

    @property
    def name(self) -> Name:
        return (self.scope, self.key)

    def body(self) -> bytes:
        return json.dumps({"cents": self.cents, **dict(self.also)}).encode()


@dataclass(slots=True)
class Attempt:
    ask: Ask
    number: int
    sent_at: float
    answered_at: float | None = None
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str | None = None

    @property
    def in_flight(self) -> bool:
        return self.answered_at is None

    @property
    def final(self) -> bool:
        """Whether a client takes it as the end of the matter."""
        return self.status is not None and not self.unknown and not self.again

    @property
    def unknown(self) -> bool:
        return self.status == 409 and UNKNOWN in self.body

    @property
    def again(self) -> bool:
        """Whether the rules say to send it again; an unknown outcome apart."""
        if self.status is None:
            return True
        if self.status == 409:
            return not self.unknown and "retry-after" in self.headers
        return self.status >= 500 or self.status in RETRIED

    def text(self) -> str:
        end = "in flight" if self.answered_at is None else f"{self.answered_at:.3f}"
        told = (
            self.error
            or f"{self.status}{' replayed' if 'idempotency-replayed' in self.headers else ''} {self.body!r:.300}"
        )
        asked = f"attempt {self.number}: POST /{self.ask.kind} {self.ask.cents}"
        return f"client  {self.sent_at:.3f} to {end}, {asked} -> {told}"


class History:
    """What the clients of one run sent and got. Times are the host's, as are the provider's."""

    def __init__(self) -> None:
        self.attempts: dict[Name, list[Attempt]] = {}
        self.outcomes: dict[Name, Outcome] = {}
        self.open: dict[int, Attempt] = {}
        self.answered = 0
        """How many attempts got an answer, whatever it was."""

    def begin(self, ask: Ask) -> Attempt:
        made = self.attempts.setdefault(ask.name, [])
        attempt = Attempt(ask, len(made) + 1, time.time())
        made.append(attempt)
        self.outcomes.setdefault(ask.name, "open")
        self.open[id(attempt)] = attempt
        return attempt

    def end(self, attempt: Attempt) -> None:
        attempt.answered_at = time.time()
        del self.open[id(attempt)]
        self.answered += attempt.status is not None

    def in_flight(self) -> list[Attempt]:
        """Sent, and not answered yet."""
        return list(self.open.values())

    def all(self) -> Iterator[Attempt]:
        for made in self.attempts.values():
            yield from made

    def asks(self) -> dict[Name, Ask]:
        """The first request under each key: the one that counts."""
        return {name: made[0].ask for name, made in self.attempts.items()}

    def of(self, outcome: Outcome) -> set[Name]:
        return {name for name, got in self.outcomes.items() if got == outcome}


class Client:
    """One connection to one server, used again as long as it holds. Use it as a ``with`` block."""

    def __init__(
        self,
        port: int,
        history: History,
        *,
        timeout: float = 10.0,
        asked: Callable[[], None] = lambda: None,
    ) -> None:
        self.port = port
        self.history = history
        self.timeout = timeout
        self.asked = asked
        """Told of every request: ``run.asked``."""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    async def send(self, ask: Ask) -> Attempt:
        """Once. Whatever happens is in the attempt; nothing is raised."""
        attempt = self.history.begin(ask)
        self.asked()
        try:
            async with asyncio.timeout(self.timeout):
                attempt.status, attempt.headers, attempt.body = await self._exchange(ask)
        except TimeoutError:
            attempt.error = f"timeout after {self.timeout:g} s"
        except (OSError, EOFError) as error:
            attempt.error = f"lost connection: {error!r:.100}"
        finally:
            if attempt.status is None:
                self.hang_up()
            if attempt.error is None and attempt.status is None:
                attempt.error = "given up"
            self.history.end(attempt)
        return attempt

    async def _exchange(self, ask: Ask) -> tuple[int, dict[str, str], bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        body = ask.body()
        head = (
            f"POST /{ask.kind} HTTP/1.1\r\nHost: shop\r\nContent-Type: application/json\r\nX-Tenant: {ask.scope}\r\n"
            f'Idempotency-Key: "{ask.key}"\r\nContent-Length: {len(body)}\r\n\r\n'
        )
        writer.write(head.encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.hang_up()
        return int(first.split()[1]), headers, answer

    def hang_up(self) -> None:
        if self._streams is not None:
            with suppress(OSError, RuntimeError):
                self._streams[1].transport.abort()
            self._streams = None

    async def pay(
        self,
        ask: Ask,
        chance: random.Random,
        *,
        patience: float | Callable[[], bool] = 30.0,
        waits_for_unknown: bool = False,
        answers: int = 2,
    ) -> Outcome:
        """Retry by the rules until the answer came ``answers`` times. "stuck": not within ``patience`` seconds; or, as
        a function, when it says so: a bound that begins when the fault has ended."""
        deadline = time.monotonic() + (0.0 if callable(patience) else patience)
        seen = 0
        while True:
            attempt = await self.send(ask)
            if attempt.final:
                seen += 1
                if seen >= answers:
                    return self._end(ask, "final")
                continue
            if attempt.unknown and not waits_for_unknown:
                return self._end(ask, "unknown")
            if patience() if callable(patience) else time.monotonic() > deadline:
                return self._end(ask, "stuck")
            await asyncio.sleep(chance.uniform(0.01, 0.06) if attempt.status is not None else 0.0)

    def _end(self, ask: Ask, outcome: Outcome) -> Outcome:
        self.history.outcomes[ask.name] = outcome
        return outcome


async def pay_all(
    port: int,
    history: History,
    asks: Iterable[Ask],
    seed: int,
    *,
    at_once: int = 16,
    timeout: float = 10.0,
    asked: Callable[[], None] = lambda: None,
    **how: Any,
) -> None:
    """So many clients side by side, each with the next request when it has its answer. ``how``: as Client.pay."""
    waiting = iter(asks)

    async def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        with Client(port, history, timeout=timeout, asked=asked) as client:
            for ask in waiting:
                await client.pay(ask, chance, **how)

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(work(number))
