"""The store is refused, hung or slow at each of its operations, at twenty keys each.

For each operation and kind of outage, keys are brought to its brink and let go together; the first that asks for it
begins the outage (``store_fault.py``). Where an operation is not about keys that its caller knows (``due``, ``purge``,
``claim``), those that wait for it are hit. Clients go on by the rules: one effect, one answer, no key stuck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from oncekey import current
from oncekey.core.audit import Audit
from oncekey.core.jobs import DeferredTo, JobState
from oncekey.core.record import StoredResponse
from oncekey.core.states import Event
from oncekey.core.swaps import Swap
from oncekey.engine.once import SINGLE_SCOPE
from oncekey.errors import StoreError
from oncekey.stores.api import Duty
from oncekey.stores.memory import MemoryStore
from oncekey.stores.redis import RedisStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing import faults
from oncekey.testing.proxy import TcpProxy
from oncekey.upkeep import Upkeep
from tests.faults.campaign import Fault, Run, on_a_server
from tests.faults.local_app import PATIENCE_SECONDS, WITHOUT_TABLES, LocalApp, Story, gather, patiently
from tests.faults.local_app_check import checked, prepare
from tests.faults.store_fault import KINDS, LIMIT, SECONDS, InFile, InMemory, Kind, OnTheWire, StoreFault

EACH = 20
WAVE = 24
WAVES = 12
"""Of so many keys, before the campaign says that the fault never comes to its point."""

Brink = Literal["new", "asked", "answered", "looked at", "owner died", "gated", "swept", "expired"]


@dataclass(frozen=True)
class Operation:
    name: str
    verb: str
    """Of the store, or a named point of ``oncekey.testing.faults``."""
    hit: Callable[[set[str], tuple[Any, ...]], Iterable[str]]
    """Of the keys of the wave, those that a call of the verb is about."""
    brink: Brink = "new"
    """How keys are brought there: asked for once, answered once, held in their handlers, left behind by an owner."""
    kinds: tuple[str, ...] = WITHOUT_TABLES
    body: Mapping[str, Any] = field(default_factory=dict)
    sql: bool = False
    """Only where there are tables to enlist."""


def _batch(wave: set[str], args: tuple[Any, ...]) -> Iterable[str]:
    return {item.key for item in args[0]} & wave


def _pairs(wave: set[str], args: tuple[Any, ...]) -> Iterable[str]:
    return {key for _, key in args[0]} & wave


def _event(*events: Event, lapsed: bool = False) -> Callable[[set[str], tuple[Any, ...]], Iterable[str]]:
    """Swaps by one of these events; ``lapsed``: of a lease that ran out."""

    def hit(wave: set[str], args: tuple[Any, ...]) -> Iterable[str]:
        batch: list[Swap] = args[0]
        wanted = (c for c in batch if c.event in events and (c.lease_over_by is not None) == lapsed)
        return {change.key for change in wanted} & wave

    return hit


def _waiting(wave: set[str], args: tuple[Any, ...]) -> Iterable[str]:
    return wave


def _lapsed(wave: set[str], args: tuple[Any, ...]) -> Iterable[str]:
    return wave if args[0] is Duty.LEASES else ()


def _here(wave: set[str], args: tuple[Any, ...]) -> Iterable[str]:
    """A point that is passed by one key at a time: it is the driver's, and knows no keys."""
    return {current().key} & wave


OPERATIONS: tuple[Operation, ...] = (
    Operation("reserve", "reserve", _batch),
    Operation("reserve: replay", "reserve", _batch, "answered"),
    Operation("retry", "swap", _event(Event.RETRY), "asked", ("repeatable",), {"first": "not executed"}),
    Operation("take over", "swap", _event(Event.TAKE_OVER, lapsed=True), "owner died", ("repeatable",)),
    Operation("doubt: request", "swap", _event(Event.DOUBT, lapsed=True), "owner died", ("external",)),
    Operation("renew", "swap", _event(Event.RENEW), "new", ("external",), {"seconds": 0.5}),
    Operation("complete", "swap", _event(Event.COMPLETE), "gated", ("external", "repeatable")),
    Operation("fail", "swap", _event(Event.FAIL), "gated", ("external",), {"first": "failed"}),
    Operation("release", "swap", _event(Event.RELEASE), "gated", ("repeatable",), {"first": "not executed"}),
    Operation("doubt: owner", "swap", _event(Event.DOUBT), "gated", ("external",), {"first": "raised"}),
    Operation("discard", "swap", _event(Event.DISCARD), "gated", ("external",), {"first": "refused"}),
    Operation("advance", "swap", _event(Event.ADVANCE), "gated", ("phased",)),
    Operation("steps", "steps", _batch, "asked", ("phased",), {"first": "stumbled"}),
    Operation("read", "read", _pairs, "looked at"),
    Operation("due", "due", _lapsed, "swept"),
    Operation("sweep", "swap", _event(Event.RELEASE, Event.DOUBT, lapsed=True), "swept"),
    Operation("purge", "purge", _waiting, "expired", ("external",)),
    Operation("enlist.open", "enlist.open", _here, "new", ("transactional", "phased"), sql=True),
    Operation("enlist.lock", "enlist.lock", _here, "new", ("transactional", "phased"), sql=True),
    Operation("enlist.complete", "enlist.complete", _here, "new", ("transactional", "phased"), sql=True),
    Operation("enlist.commit", "enlist.commit", _here, "new", ("transactional", "phased"), sql=True),
    Operation("claim", "claim", _waiting, "asked", ("deferred",), sql=True),
    Operation("renew_jobs", "renew_jobs", lambda w, args: args[1], "asked", ("deferred",), {"works": 0.5}, sql=True),
    Operation("note_provider", "note_provider", lambda w, args: {args[0]}, "asked", ("deferred",), sql=True),
    Operation("conclude", "conclude", lambda w, args: {c.id for c in args[0]}, "asked", ("deferred",), sql=True),
)


OPERATORS: Mapping[str, Callable[[Any], object]] = {
    "audit": lambda store: store.audit(SINGLE_SCOPE, "key", 10),
    "find": lambda store: store.find(provider_id="ch_absent"),
    "listing": lambda store: store.listing(),
    "counts": lambda store: store.counts(),
    "jobs": lambda store: store.jobs(JobState.DEAD, 10),
    "jobs_of": lambda store: store.jobs_of(SINGLE_SCOPE, "key", 10),
    "job": lambda store: store.job("none"),
    "deferred_to": lambda store: store.deferred_to(DeferredTo(SINGLE_SCOPE, "key", "an owner")),
    "outbox_health": lambda store: store.outbox_health(),
    "redirect": lambda store: store.redirect("none", JobState.READY, Audit("operator", "a test")),
    "purge_jobs": lambda store: store.purge_jobs(10, 3600.0),
    "purge_audit": lambda store: store.purge_audit(10, 3600.0),
    "time_out": lambda store: store.time_out(10, StoredResponse(408, (), b"")),
}
"""What operators and upkeep ask: no request waits for it, so that it fails in time is all there is to say."""
IN_TIME_SECONDS = 5.0


WITHOUT_SQL: Mapping[str, type] = {"memory": MemoryStore, "redis": RedisStore}


def cells(store: str) -> list[tuple[Operation, Kind]]:
    return [(op, kind) for op in OPERATIONS if store not in WITHOUT_SQL or not op.sql for kind in KINDS]


def count_of(store: str) -> int:
    return EACH * (len(cells(store)) + len(operators(store)) * len(KINDS))


def operators(store: str) -> list[str]:
    """What can be asked of this store: some have no outbox."""
    kind = WITHOUT_SQL.get(store)
    return [verb for verb in OPERATORS if kind is None or hasattr(kind, verb)]


def every_operation(run: Run) -> None:
    with _hospital(run) as (store_fault, local, past):
        asyncio.run(_rounds(run, store_fault, local, past))


@contextmanager
def _hospital(run: Run) -> Iterator[tuple[StoreFault, Callable[[], LocalApp], str | None]]:
    """The store and what makes it ill; the app; and the way to its tables that stays well."""
    if run.store == "memory":
        store = MemoryStore()
        yield StoreFault(store, InMemory(run.random)), lambda: LocalApp(store, begin_timeout=LIMIT), None
        return
    url = run.url()
    if run.store == "redis":
        with TcpProxy("127.0.0.1", run.own_redis.port) as proxy:
            redis = RedisStore(f"{proxy.rewrite(url)}?timeout={LIMIT}")
            redis.check()  # outages are shorter than the pause before a server is looked at again
            yield (
                StoreFault(redis, OnTheWire(proxy)),
                lambda: LocalApp(redis, begin_timeout=LIMIT, transactions=False),
                None,
            )
        return
    prepare(url)
    if run.store == "sqlite":
        path = Path(url.removeprefix("sqlite:///"))
        file = SqliteStore(path, timeout=LIMIT)
        file.check()  # a file that it has never seen it would make anew, when it is away
        with closing(InFile(path)) as lock:
            yield StoreFault(file, lock), lambda: LocalApp(file, url=url, begin_timeout=LIMIT, works=True), url
        return
    port = urlsplit(url).port
    assert port is not None
    with TcpProxy("127.0.0.1", port) as proxy:
        far = proxy.rewrite(url)
        server = on_a_server(far, timeout=LIMIT, lock_timeout=0.1)
        yield (
            StoreFault(server, OnTheWire(proxy)),
            lambda: LocalApp(server, url=far, begin_timeout=LIMIT, works=True),
            url,
        )


async def _rounds(run: Run, store_fault: StoreFault, make: Callable[[], LocalApp], past: str | None) -> None:
    local = make()
    local.outage = lambda: store_fault.outage
    todo = cells(run.store)
    if run.count <= EACH:  # the short form: not those that keys come to one after another
        todo = [(operation, kind) for operation, kind in todo if not operation.sql]
    run.random.shuffle(todo)
    slowest = 0.0
    async with local.open():
        for operation, kind in todo:
            if not run.wanting:
                break
            began, hit = time.monotonic(), 0
            for _ in range(WAVES):
                hit += await _wave(run, local, store_fault, operation, kind)
                run.asked(sum(local.statuses.values()) - run.requests)
                if hit >= EACH:
                    break
            else:
                raise RuntimeError(f"{kind} at '{operation.name}': only {hit} keys came to that point")
            run.hit(min(EACH, run.count - run.hits))
            slowest = max(slowest, time.monotonic() - began)
        for verb, kind in product(operators(run.store), KINDS):
            if run.wanting:
                await asyncio.to_thread(_ask_as_operator, run, store_fault, verb, kind)
    await checked(run, local, past)
    run.notes += [f"{len(todo)} operations and kinds", f"the slowest took {slowest:.1f} s"]


def _ask_as_operator(run: Run, store_fault: StoreFault, verb: str, kind: Kind) -> None:
    """Each question gets its answer or an error of ours, in time."""

    def ask(number: int) -> str | None:
        began = time.monotonic()
        try:
            OPERATORS[verb](store_fault.store)
        except StoreError:
            pass
        except Exception as error:
            return f"{verb}, {kind}: {error!r}"
        finally:
            store_fault.store.disconnect()
        took = time.monotonic() - began
        return f"{verb}, {kind}: took {took:.1f} s" if took > IN_TIME_SECONDS else None

    numbers = count()
    store_fault.wait_for(verb, lambda args: {f"{verb} {next(numbers)}"}, kind, EACH)
    with ThreadPoolExecutor(EACH) as pool:
        told = list(pool.map(ask, range(EACH)))
    store_fault.rest()
    for wrong in told:
        if wrong:
            run.violated("I7", wrong)
    run.hit(min(len(store_fault.hits), run.count - run.hits))


async def _wave(run: Run, local: LocalApp, store_fault: StoreFault, operation: Operation, kind: Kind) -> int:
    """Bring keys to the brink, let them go, and wait until all is over; how many were hit."""
    stories = [
        local.story(operation.kinds[number % len(operation.kinds)], **operation.body, **_held(operation))
        for number in range(WAVE)
    ]
    wave = {story.key for story in stories}
    local.gate, local.waiting = asyncio.Event(), 0
    await _to_the_brink(local, operation, stories)
    asking: list[Any] = []
    if operation.brink == "gated":
        asking = [asyncio.create_task(local.pay(story)) for story in stories]
        async with asyncio.timeout(10):
            while local.waiting < len(stories):
                await asyncio.sleep(0.005)
    with _waited_for(store_fault, operation, kind, wave):
        local.gate.set()
        if operation.brink in ("swept", "expired"):
            async with Upkeep(local.once, sweep_every=0.05, reap_every=0.05, reconcile_every=60.0):
                await asyncio.sleep(SECONDS[kind] + 0.3)
        elif operation.brink == "looked at":
            for status, content in await asyncio.gather(*(local.look(story) for story in stories)):
                if status not in (201, 503):
                    run.violated("I2", f"a look at a finished key got {status} {content!r}")
        if operation.brink != "expired":
            await gather(asking or [local.pay(story) for story in stories])
    if operation.brink == "expired":
        del local.stories[-len(stories) :]
        await _reaped(run, local, wave)
    return len(store_fault.hits)


def _held(operation: Operation) -> dict[str, Any]:
    return {"waits": True} if operation.brink == "gated" else {}


async def _to_the_brink(local: LocalApp, operation: Operation, stories: list[Story]) -> None:
    match operation.brink:
        case "asked":
            await gather([local.ask(story) for story in stories])
        case "answered" | "looked at":
            await gather([local.pay(story) for story in stories])
            for story in stories:
                del story.answers[1:]
        case "owner died" | "swept":
            local.leave_behind(stories)
        case "expired":
            local.leave_behind(stories, expired=True)


@contextmanager
def _waited_for(store_fault: StoreFault, operation: Operation, kind: Kind, wave: set[str]) -> Iterator[None]:
    with ExitStack() as stack:
        if operation.verb in faults.POINTS:
            stack.enter_context(_Passed(operation.verb, lambda: store_fault.pass_by(operation.verb, ())))
        store_fault.wait_for(operation.verb, partial(operation.hit, wave), kind, EACH)
        stack.callback(store_fault.rest)
        yield


class _Passed(faults.Fault):
    """Tells whenever a point is about to be passed."""

    def __init__(self, point: str, tell: Callable[[], None]) -> None:
        super().__init__(point, "before", tell, 1)
        for owner, name in faults.places_of(point):
            self.put(owner, name)

    def at(self, when: faults.When) -> None:
        if when == "before":
            self._action()


async def _reaped(run: Run, local: LocalApp, wave: set[str]) -> None:
    """What was past its expiry goes, when the outage is over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    async with Upkeep(local.once, sweep_every=60.0, reap_every=0.05, reconcile_every=60.0):
        keys = [(SINGLE_SCOPE, key) for key in wave]
        while left := [record for record in patiently(lambda: local.once.store.read(keys)) if record]:
            if time.monotonic() > deadline:
                run.violated("I4", f"past their expiry, and still there: {left}")
                return
            await asyncio.sleep(0.02)


FAULTS = (
    Fault(
        "store refused, hung or slow at each operation",
        every_operation,
        {store: count_of(store) for store in ("memory", "sqlite", "postgres", "redis", "mysql")},
        short=EACH,
        promises=("I1", "I2", "I4", "I7"),
        seconds=150.0,
    ),
)
