"""How the duties run: together, apart from each other, and no longer than they should."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from oncekey import SINGLE_TENANT, Confirmed, OnceKey
from oncekey.core.states import Effects, State
from oncekey.core.verdicts import Verdict
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.telemetry.events import DutyDone, DutyFailed, Event
from oncekey.testing.servers import PostgresServer
from oncekey.upkeep import Inquiry, Reaper, Reconciler, Sweeper, Upkeep
from oncekey.upkeep.service import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, _Duty
from oncekey.upkeep.unasked import Reporter
from oncekey.web.asgi import IdempotencyMiddleware
from tests.upkeep.key_store import LEASE, OPERATION, RETENTION, KeyStore

ALL = ("sweep", "reap", "reconcile", "resume")


class Watch:
    """A hook that one can wait at."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self._more = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._more:
            self.told.append(event)
            self._more.notify_all()

    def count(self, kind: type[Event], duty: str) -> int:
        return sum(isinstance(event, kind) and getattr(event, "duty", "") == duty for event in self.told)

    def wait_for(self, kind: type[Event], duty: str, times: int = 1) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self.count(kind, duty) >= times, 20)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def once(rows: KeyStore, watch: Watch) -> Iterator[OnceKey]:
    made = OnceKey(rows.store, scope=SINGLE_TENANT, on_event=watch)
    yield made
    made.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the moment that a duty may take before its first turn, none is taken."""
    monkeypatch.setattr("oncekey.upkeep.service.random", SimpleNamespace(uniform=lambda low, high: low))


def test_service_runs_all_duties(rows: KeyStore, once: OnceKey, watch: Watch) -> None:
    """A key of each kind is where it belongs after a few turns, without an operator."""
    gone, external = *rows.finished(), *rows.reserved()
    (harmless,) = rows.reserved(effects=Effects.REPEATABLE, retention=10 * RETENTION)
    rows.age(RETENTION + 1)
    once.resolve_with(OPERATION, lambda inquiry: Confirmed(201))
    with Upkeep(once, sweep_every=0.05, reap_every=0.05, reconcile_every=0.05, resume_every=0.05) as upkeep:
        for duty in ALL:
            watch.wait_for(DutyDone, duty, 2)
        watch.wait_for(DutyDone, "reconcile", watch.count(DutyDone, "reconcile") + 2)
        health = upkeep.health()
    assert rows.states([gone, external, harmless]) == [None, State.COMPLETED, State.FAILED_RETRYABLE]
    assert [duty.name for duty in health.duties] == list(ALL)
    for each in health.duties:
        assert each.succeeded_seconds_ago is not None
        assert (each.failures, each.last_error) == (0, None)
    assert health.problems == []


class _Broken(Sweeper):
    """Fails in the way it is told to, for as long as it is told to."""

    error: Exception | None = StoreUnavailable("the store is on fire")

    def run(self, stop: threading.Event | None = None, *, dry_run: bool = False):
        if self.error is not None:
            raise self.error
        return super().run(stop, dry_run=dry_run)


def test_failed_duty_is_reported_and_tried_again(
    rows: KeyStore, once: OnceKey, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told and tried again, the others go on, and when it works again all is as before."""
    monkeypatch.setattr("oncekey.upkeep.service.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("oncekey.upkeep.service.LONGEST_RETRY_SECONDS", 0.02)
    sweeper = _Broken(rows.store)
    with Upkeep(once, sweep_every=0.02, reap_every=0.02, reconcile_every=0.02, sweeper=sweeper) as upkeep:
        watch.wait_for(DutyFailed, "sweep", 2)
        watch.wait_for(DutyDone, "reap", watch.count(DutyDone, "reap") + 2)
        (sweep,) = [duty for duty in upkeep.health().duties if duty.name == "sweep"]
        assert (sweep.succeeded_seconds_ago, sweep.last_error) == (None, "StoreUnavailable: the store is on fire")
        assert sweep.failures >= 2
        assert upkeep.health().problems[0].startswith("sweep succeeded never and failed")
        sweeper.error = ZeroDivisionError("a bug of ours")
        before = watch.count(DutyFailed, "sweep")
        watch.wait_for(DutyFailed, "sweep", before + 2)
        sweeper.error = None
        watch.wait_for(DutyDone, "sweep")
        assert upkeep.health().problems == []


def test_pauses_after_failures_grow_to_a_minute() -> None:
    """They grow up to a minute, and end with the first success."""
    duty = _Duty("sweep", 10.0, lambda *_: None)  # type: ignore[arg-type]
    assert 8.0 <= duty.pause() <= 12.0
    pauses = []
    for _ in range(20):
        duty.failed("no")
        pauses.append(duty.pause())
    assert 0.5 * FIRST_RETRY_SECONDS <= pauses[0] <= FIRST_RETRY_SECONDS
    assert all(LONGEST_RETRY_SECONDS / 2 <= pause <= LONGEST_RETRY_SECONDS for pause in pauses[10:])
    duty.succeeded()
    assert 8.0 <= duty.pause() <= 12.0


def test_hung_resolver_does_not_stop_other_duties(rows: KeyStore, once: OnceKey, watch: Watch) -> None:
    """The other duties go on, and a stop does not wait for it. Asked again later, since it said nothing."""
    (record,) = rows.unknown()
    asked, free = threading.Event(), threading.Event()

    @once.resolver(OPERATION)
    def hangs(inquiry: Inquiry) -> Verdict:
        asked.set()
        free.wait(30)
        return Confirmed(201)

    upkeep = Upkeep(once, sweep_every=0.02, reap_every=0.02, reconcile_every=0.02)
    upkeep.start()
    assert asked.wait(20)
    watch.wait_for(DutyDone, "sweep", watch.count(DutyDone, "sweep") + 3)
    began = time.monotonic()
    assert upkeep.stop()
    assert time.monotonic() - began < 20, "it waited for the resolver"
    free.set()
    assert rows.get(record).state is State.UNKNOWN


@pytest.mark.usefixtures("at_once")
def test_stop_is_quick_and_start_comes_after(rows: KeyStore, once: OnceKey, watch: Watch) -> None:
    """Schedules of an hour do not hold it up; it can be started again; twice at once is refused."""
    upkeep = Upkeep(once, sweep_every=3600, reap_every=3600, reconcile_every=3600)
    others = set(threading.enumerate())
    for turn in (1, 2):
        upkeep.start()
        with pytest.raises(ConfigurationError, match="running already"):
            upkeep.start()
        for duty in ALL:
            watch.wait_for(DutyDone, duty, turn)
        began = time.monotonic()
        assert upkeep.stop()
        assert time.monotonic() - began < 20, "it waited for the next turn"
    mine = set(threading.enumerate()) - others
    assert not [thread for thread in mine if thread.name in {f"oncekey-{duty}" for duty in ALL}]


async def test_async_resolvers_run_in_the_loop_of_the_start(rows: KeyStore, once: OnceKey, watch: Watch) -> None:
    """Async resolvers run in the loop that it was started in: what they use belongs to it."""
    (record,) = rows.unknown()
    loop = asyncio.get_running_loop()
    settled = asyncio.Event()

    @once.resolver(OPERATION)
    async def ask(inquiry: Inquiry) -> Verdict:
        assert asyncio.get_running_loop() is loop
        settled.set()
        return Confirmed(201)

    async with Upkeep(once, reconcile_every=0.05):
        await asyncio.wait_for(settled.wait(), 20)
        await asyncio.to_thread(watch.wait_for, DutyDone, "reconcile", 1)
    assert rows.get(record).state is State.COMPLETED


async def test_stopped_while_an_async_resolver_is_asked(rows: KeyStore, once: OnceKey) -> None:
    """It is cancelled, in its own loop, and the key is as it was."""
    (record,) = rows.unknown()
    asked, cancelled = asyncio.Event(), asyncio.Event()

    @once.resolver(OPERATION)
    async def ask(inquiry: Inquiry) -> Verdict:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with Upkeep(once, reconcile_every=0.05):
        await asyncio.wait_for(asked.wait(), 20)
    assert cancelled.is_set()
    assert rows.get(record).reconcile_tries == 0


def test_its_own_loop_is_one_for_all_turns(rows: KeyStore, once: OnceKey, watch: Watch) -> None:
    """Outside of a loop there is one of its own, always the same: clients of async resolvers belong to one."""
    loops = set()

    @once.resolver(OPERATION)
    async def ask(inquiry: Inquiry) -> Verdict:
        loops.add(asyncio.get_running_loop())
        return Confirmed(201)

    with Upkeep(once, reconcile_every=0.02):
        for _ in range(2):
            rows.unknown()
            watch.wait_for(DutyDone, "reconcile", watch.count(DutyDone, "reconcile") + 2)
    assert len(loops) == 1


# -- in an ASGI app ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
async def test_one_line_in_a_lifespan(rows: KeyStore, once: OnceKey, watch: Watch) -> None:
    """It runs from the start of the app to the beginning of its end, before the app closes what resolvers use."""
    (record,) = rows.reserved(effects=Effects.REPEATABLE)
    rows.age(LEASE + 1)
    threads: list[int] = []
    others = set(threading.enumerate())

    async def running() -> None:
        mine = set(threading.enumerate()) - others
        threads.append(sum(thread.name.startswith("oncekey-sweep") for thread in mine))

    app = Starlette(middleware=[Middleware(IdempotencyMiddleware, once=once, upkeep=True, tune=False)])
    sent: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    received: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    await received.put({"type": "lifespan.startup"})
    serving = asyncio.create_task(
        app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, received.get, sent.put)  # type: ignore[arg-type]
    )
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    await asyncio.to_thread(watch.wait_for, DutyDone, "sweep", 1)
    await running()
    await received.put({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await serving
    await running()
    assert threads == [1, 0]
    assert rows.get(record).state is State.FAILED_RETRYABLE


async def test_nothing_runs_before_the_lifespan_begins(rows: KeyStore, once: OnceKey) -> None:
    app = IdempotencyMiddleware(Starlette(), once=once)
    others = set(threading.enumerate())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        await client.get("/")
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "oncekey-sweep"]


# -- once, and how it goes ---------------------------------------------------------------------------------------------


def test_run_once_takes_one_turn_of_each_duty(rows: KeyStore, once: OnceKey) -> None:
    """One turn of each, in this thread; a dry run only counts."""
    once.resolve_with(OPERATION, lambda inquiry: Confirmed(201))
    keys = [*rows.finished(2), *rows.reserved(1)]
    rows.age(RETENTION + 1)
    counted = {turn.duty: turn.result.as_json() for turn in Upkeep(once).run_once(dry_run=True) if turn.result}
    assert (counted["sweep"]["doubted"], counted["reap"]["deleted"], counted["reconcile"]["due"]) == (1, 2, 0)
    assert rows.states(keys) == [State.COMPLETED, State.COMPLETED, State.IN_PROGRESS]
    done = {turn.duty: turn.result.as_json() for turn in Upkeep(once).run_once() if turn.result}
    assert done["sweep"]["doubted"] == 1
    assert done["reap"]["deleted"] == 2
    assert done["reconcile"]["confirmed"] == 1
    assert rows.states(keys) == [None, None, State.COMPLETED]


def test_upkeep_without_an_app_counts_no_tries(rows: KeyStore) -> None:
    """Only a store: unknown keys are reported, and no try is counted: their resolver may run in another process."""
    (record,) = rows.unknown()
    upkeep = Upkeep(rows.store)
    assert [turn.duty for turn in upkeep.run_once()] == ["sweep", "reap", "report"]
    assert (rows.get(record).state, rows.get(record).reconcile_tries) == (State.UNKNOWN, 0)


def test_upkeep_without_an_app_reports_unknown_keys(rows: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    """That no upkeep of the app asks, once an hour; and what the app's own upkeep found no resolver for."""
    now = 0.0
    reporter = Reporter(rows.store, lambda: now)
    rows.unknown(2)
    assert reporter.run().as_json() == {"unknown": 2, "without_resolver": 0}
    assert caplog.messages == [], "an upkeep of the app may ask in a moment"
    rows.age(61)
    for _ in range(3):
        reporter.run()
    (line,) = caplog.messages
    assert line.startswith("2 keys are unknown, the oldest has been due for 6")
    assert "oncekey upkeep MODULE:ONCE" in line
    reconciler = Reconciler(rows.once())
    reconciler.run()
    reconciler.close()
    caplog.clear()
    assert reporter.run().as_json() == {"unknown": 2, "without_resolver": 2}
    reporter.run()
    (line,) = caplog.messages
    assert line.startswith("2 keys are unknown and no resolver is registered for POST /payments: ")
    now = 3_601.0
    reporter.run()
    assert len(caplog.messages) == 2


def test_settings_that_make_no_sense(rows: KeyStore) -> None:
    for name in ("sweep_every", "reap_every", "reconcile_every"):
        with pytest.raises(ConfigurationError, match=name):
            Upkeep(rows.store, **{name: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="say it to the reaper"):
        Upkeep(rows.store, soft=True, reaper=Reaper(rows.store))


def test_soft_service_keeps_expired_keys(rows: KeyStore) -> None:
    (record,) = rows.finished()
    rows.age(RETENTION + 1)
    Upkeep(rows.store, soft=True).run_once()
    assert rows.states([record]) == [State.EXPIRED]


def test_a_store_that_goes_away_and_comes_back() -> None:
    """PostgreSQL restarts: the duties fail meanwhile, and go on by themselves."""
    watch = Watch()
    with PostgresServer(fsync=False) as server:
        url = server.database("upkeep")
        rows = KeyStore(url)
        once = OnceKey(url, scope=SINGLE_TENANT, on_event=watch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("oncekey.upkeep.service.FIRST_RETRY_SECONDS", 0.05)
            with Upkeep(once, sweep_every=0.05, reap_every=0.05, reconcile_every=0.05):
                watch.wait_for(DutyDone, "sweep")
                server.kill()
                watch.wait_for(DutyFailed, "sweep")
                watch.wait_for(DutyFailed, "reap")
                server.start()
                for duty in ("sweep", "reap"):
                    watch.wait_for(DutyDone, duty, watch.count(DutyDone, duty) + 1)
        once.close()
        rows.close()
