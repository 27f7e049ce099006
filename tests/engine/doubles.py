"""What the engine's tests share: a store that can be held, broken and asked what it was asked, and values to ask with.

Nothing here sleeps for a fixed time. A test waits for something to happen (``Gate.wait``, ``eventually``), and what
should have happened within ``PATIENCE`` and has not is a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from oncekey.core.policy import Policy
from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import Effects, State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.engine.batching.ticket import AsyncTicket
from oncekey.engine.engine import Engine
from oncekey.engine.operation import Operation
from oncekey.stores.api import Capabilities, Duty
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import Event

PATIENCE = 25.0
"""How long a test waits for what must happen. Only a failing one waits so long: a crowded machine is no failure."""
LEASE = 60.0
RETENTION = 3600.0
RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b'{"id":"pay_1"}')

_numbers = count(1)
_T = TypeVar("_T")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def eventually(check: Callable[[], _T], what: str = "") -> _T:
    """Ask until the answer is true, and give it; for what no event can be had."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := check()):
        assert time.monotonic() < deadline, f"did not happen in time: {what or check}"
        threading.Event().wait(0.002)
    return answer


# ---------------------------------------------------------------- values


async def waiting(ticket: AsyncTicket) -> Any:
    """As a request waits: in a task of its own, which can be cancelled."""
    return await ticket.future


def reservation(
    key: str = "key-1",
    *,
    scope: str = "tenant-1",
    owner: str | None = None,
    effects: Effects = Effects.REPEATABLE,
    fingerprint: bytes = b"f" * 32,
    lease: float = LEASE,
) -> Reservation:
    """A request; its owner token is new, its fingerprint is that of every other."""
    owner = owner or f"owner-{next(_numbers)}"
    return Reservation(scope, key, "POST /payments", fingerprint, 1, effects, owner, lease, RETENTION)


def record_of(wanted: Reservation, state: State = State.IN_PROGRESS, **changed: Any) -> Record:
    """The row as this reservation would have left it, at the store's time 1000."""
    row = Record(
        scope=wanted.scope,
        key=wanted.key,
        operation=wanted.operation,
        fingerprint=wanted.fingerprint,
        fingerprint_version=wanted.fingerprint_version,
        effects=wanted.effects,
        state=state,
        attempt=1,
        owner=wanted.owner,
        lease_until=1_000.0 + wanted.lease_seconds,
        recovery_point=None,
        response=None,
        last_error=None,
        reconcile_at=None,
        reconcile_tries=0,
        created_at=1_000.0,
        finished_at=None,
        retention_seconds=wanted.retention_seconds,
        expires_at=1_000.0 + wanted.retention_seconds,
        now=1_000.0,
    )
    return replace(row, **changed)


# ---------------------------------------------------------------- a store that obeys


class Gate:
    """A verb stops here. ``wait`` for it to arrive, do what there is to do meanwhile, then ``open``."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._opened = threading.Event()

    def wait(self) -> None:
        assert self._arrived.acquire(timeout=PATIENCE), "the store was not asked"

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self._arrived.release()
        self._opened.wait(PATIENCE * 3)


class _Fault:
    def __init__(
        self, error: Callable[[], Exception], times: int, applied: bool, about: Callable[[list[Any]], bool]
    ) -> None:
        self.error, self.times, self.applied, self.about = error, times, applied, about


class FakeStore(MemoryStore):
    """The store in memory; it writes down every batch, stops at gates, and fails as it is told."""

    def __init__(self, *, writers: int = 1, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self.inner = MemoryStore(clock)
        self.capabilities = Capabilities(durable=False, shared=False, server_clock=False, writers=writers)
        self.batches: list[tuple[str, list[Any]]] = []
        self.threads: set[str] = set()
        self.migrations = 0
        self.disconnects = 0
        self.closed = False
        self._gates: dict[str, list[Gate]] = {}
        self._faults: dict[str, list[_Fault]] = {}

    # what a test says

    def hold(self, verb: str) -> Gate:
        """The next call of this verb, and every one until the gate is opened, stops before it does anything."""
        gate = Gate()
        self._gates.setdefault(verb, []).append(gate)
        return gate

    def break_(
        self,
        verb: str,
        error: Callable[[], Exception],
        *,
        times: int = 1_000_000,
        applied: bool = False,
        about: Callable[[list[Any]], bool] = lambda batch: True,
    ) -> None:
        """Let this verb fail. ``applied``: it does what was asked first, and only the answer is lost."""
        self._faults.setdefault(verb, []).append(_Fault(error, times, applied, about))

    def heal(self) -> None:
        self._faults = {}

    def asked(self, verb: str) -> list[list[Any]]:
        """The batches of one verb, in order."""
        return [batch for name, batch in list(self.batches) if name == verb]

    def keys(self, verb: str) -> list[list[str]]:
        return [[work[1] if isinstance(work, tuple) else work.key for work in batch] for batch in self.asked(verb)]

    def row(self, key: str = "key-1", scope: str = "tenant-1") -> Record | None:
        return self.inner.read([(scope, key)])[0]

    def put(self, wanted: Reservation) -> Record:
        """A row that is there already."""
        found = self.inner.reserve([wanted])[0].record
        assert found is not None
        return found

    # what a lane asks

    def _do(self, verb: str, batch: Sequence[Any], call: Callable[[Any], list[Any]]) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.batches.append((verb, list(batch)))
        for gate in self._gates.get(verb, []):
            gate.pass_through()
        fault = next((f for f in self._faults.get(verb, []) if f.times > 0 and f.about(list(batch))), None)
        if fault is None:
            return call(batch)
        fault.times -= 1
        if fault.applied:
            call(batch)
        raise fault.error()

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        return self._do("reserve", batch, self.inner.reserve)

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        return self._do("swap", batch, self.inner.swap)

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        return self._do("read", keys, self.inner.read)

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        return self._do("steps", keys, self.inner.steps)

    def due(self, duty: Duty, limit: int) -> list[Record]:
        return self.inner.due(duty, limit)

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        return self.inner.purge(limit, expired_state_only=expired_state_only)

    def migrate(self) -> list[str]:
        self.migrations += 1
        self._do("migrate", [], lambda batch: [])
        return []

    def check(self) -> None:
        self._do("check", [], lambda batch: [])

    def disconnect(self) -> None:
        self.disconnects += 1

    def close(self) -> None:
        self.closed = True


class SharingStore(FakeStore):
    """It begins and ends requests in one commit."""

    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        def call(_: object) -> list[Any]:
            moved = self.inner.swap(ends)
            return [self.inner.reserve(begins), moved]

        found, moved = self._do("both", [*ends, *begins], call)
        return found, moved


# ---------------------------------------------------------------- an engine that is listened to


class Heard(list[Event]):
    """Every event that an engine emitted."""

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self]

    def of(self, kind: type[_T]) -> list[_T]:
        return [event for event in self if isinstance(event, kind)]


def listening(store: Any) -> tuple[Engine, Heard]:
    heard = Heard()
    return Engine(store, emitter=Emitter(heard.append)), heard


def operation_of(record: Record, policy: Policy | None = None) -> Operation:
    return Operation(record, policy or Policy(), record.scope)


# ---------------------------------------------------------------- flows by hand


class Played:
    """What a flow asked for when it was sent these answers, and how it ended."""

    def __init__(self, flow: Any, answers: Iterable[Any]) -> None:
        self.asked: list[Any] = []
        self.result: Any = None
        self.ended = False
        try:
            step = next(flow)
            for answer in answers:
                self.asked.append(step)
                step = flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer)
            self.asked.append(step)
        except StopIteration as end:
            self.result, self.ended = end.value, True


def play(flow: Any, *answers: Any) -> Played:
    return Played(flow, answers)
