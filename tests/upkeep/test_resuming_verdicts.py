"""A verdict about one effect, through a real app: the next attempt goes on after it, and a late owner is fenced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from oncekey import Confirmed, Happened, NotHappened, Refuted
from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.steps import StepsOf
from oncekey.core.verdicts import Verdict
from oncekey.upkeep import Inquiry, Outcome, Reconciler, Settlement, Upkeep
from oncekey.upkeep.reconciler import Reconciled
from tests.faults.fork_server import ForkServer
from tests.upkeep.stopped_rides import KEY, OPERATION, Elsewhere, Rides, ride_elsewhere

StartElsewhere = Callable[[str], Elsewhere]
AT = ("single-tenant", KEY)


@pytest.fixture(params=["sqlite", "postgres"])
def rides(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rides]:
    sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/rides.db" if sqlite else request.getfixturevalue("postgres_url")
    made = Rides(url, tmp_path / "ledger")
    with made.once:
        yield made


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(roles={"ride": ride_elsewhere}, log=tmp_path_factory.mktemp("rides") / "log") as forks:
        yield forks


@pytest.fixture
def elsewhere(forks: ForkServer, rides: Rides) -> StartElsewhere:
    """Starts the app in another process, with an async or a sync handler."""
    return partial(Elsewhere, forks, rides)


def record_of(rides: Rides) -> Record:
    (record,) = rides.once.store.read([AT])
    rides.once.store.disconnect()
    assert record is not None
    return record


async def settled(rides: Rides, verdict: Verdict, **named: str) -> Settlement:
    """Bring it until the dead owner's lease and the quarantine are over, as a sender of webhooks does."""
    while True:
        settlement = await rides.once.ingest(verdict, **(named or {"key": KEY}))
        if settlement.outcome not in (Outcome.OPEN, Outcome.TOO_EARLY) or settlement.retry_in is None:
            return settlement
        await asyncio.sleep(settlement.retry_in + 0.001)


def reconciled(rides: Rides) -> Reconciled:
    reconciler = Reconciler(rides.once)
    try:
        return reconciler.run()
    finally:
        reconciler.close()
        rides.once.store.disconnect()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_retry_after_a_kill_goes_on_after_the_effect_that_happened(
    rides: Rides, elsewhere: StartElsewhere, kind: str
) -> None:
    """No phase is skipped, and nothing is charged again."""
    elsewhere(kind).kill()
    settlement = await settled(rides, Happened({"id": "ch_7"}, effect="charge", provider_id="ch_7"))
    assert (settlement.outcome, settlement.over) == (Outcome.SETTLED, True)
    assert record_of(rides).state is State.FAILED_RETRYABLE
    answer = await rides.send(kind)
    assert (answer.status_code, answer.json()) == (201, {"id": "ch_7"})
    assert (rides.rides, rides.charges, record_of(rides).state) == (["ch_7"], 1, State.COMPLETED)
    again = await rides.once.ingest(Happened({"id": "ch_8"}), provider_id="ch_7")
    assert (again.outcome, again.over) == (Outcome.ALREADY, True)


async def test_corrected_result_lets_a_request_go_on_that_a_wrong_verdict_had_stopped(
    rides: Rides, elsewhere: StartElsewhere
) -> None:
    """A string where the handler wants an object: every retry is 500, until an operator corrects it."""
    elsewhere("async").kill()
    await settled(rides, Happened("just a string", effect="charge"))
    for _ in range(2):
        assert (await rides.send()).status_code == 500
    record = record_of(rides)
    assert (record.state, rides.rides) == (State.FAILED_RETRYABLE, [None])
    changes.correct(rides.once.store, record, Happened({"id": "ch_7"}, "charge"), Audit("ann", "it was a string"))
    rides.once.store.disconnect()
    answer = await rides.send()
    assert (answer.status_code, answer.json(), rides.rides, rides.charges) == (201, {"id": "ch_7"}, ["ch_7"], 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_retry_calls_the_effect_that_did_not_happen(rides: Rides, elsewhere: StartElsewhere, kind: str) -> None:
    elsewhere(kind).kill()
    rides.ledger.write_text("")  # the request to the provider was lost on its way
    settlement = await settled(rides, NotHappened("no such charge", effect="charge"))
    assert settlement.outcome is Outcome.SETTLED
    answer = await rides.send(kind)
    assert (answer.status_code, rides.rides, rides.charges) == (201, ["ch_of_the_handler"], 1)
    assert record_of(rides).state is State.COMPLETED


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_late_owner_that_wakes_up_after_the_verdict_changes_nothing(
    rides: Rides, elsewhere: StartElsewhere, kind: str
) -> None:
    paused = elsewhere(kind)
    paused.pause()
    settlement = await settled(rides, Happened({"id": "ch_7"}))
    assert settlement.outcome is Outcome.SETTLED
    before, steps = record_of(rides), rides.once.store.steps([StepsOf(*AT)])
    assert await asyncio.to_thread(paused.wake_up) != "201", "its result was not stored, so it is not a success"
    after = record_of(rides)
    assert (after.state, after.owner, after.recovery_point) == (before.state, before.owner, "charge")
    assert (rides.once.store.steps([StepsOf(*AT)]), rides.rides) == (steps, [None])
    answer = await rides.send(kind)
    assert (answer.status_code, answer.json(), rides.rides, rides.charges) == (201, {"id": "ch_7"}, ["ch_7"], 1)


async def test_webhook_names_the_effect_by_its_downstream_key(rides: Rides, elsewhere: StartElsewhere) -> None:
    elsewhere("async").kill()
    ((*_, charge),) = rides.once.store.steps([StepsOf(*AT)])
    assert charge.downstream_key is not None
    settlement = await settled(rides, Happened({"id": "ch_7"}), downstream_key=charge.downstream_key)
    assert settlement.outcome is Outcome.SETTLED
    again = await rides.once.ingest(Happened({"id": "ch_7"}), downstream_key=charge.downstream_key)
    assert (again.outcome, again.over) == (Outcome.ALREADY, True), "delivered twice: no retry is needed to say so"
    assert (await rides.send()).json() == {"id": "ch_7"}


async def test_resolver_settles_the_effect_and_the_retry_goes_on(rides: Rides, elsewhere: StartElsewhere) -> None:
    elsewhere("async").kill()
    asked: list[tuple[str, ...]] = []

    @rides.once.resolver(OPERATION)
    def ask(inquiry: Inquiry) -> Verdict:
        asked.append(inquiry.in_doubt)
        return Happened({"id": "ch_7"}, inquiry.in_doubt[0])

    assert (await settled(rides, Confirmed(201))).outcome is Outcome.REFUSED  # and swept, by the way
    done = await asyncio.to_thread(reconciled, rides)
    assert (done.happened, asked) == (1, [("charge",)])
    assert (await rides.send()).json() == {"id": "ch_7"}
    assert (rides.rides, rides.charges) == (["ch_7"], 1)


async def test_upkeep_goes_on_after_the_effect_where_the_client_never_comes_back(
    rides: Rides, elsewhere: StartElsewhere
) -> None:
    """The sweeper, the resolver and the resume function, in one round of upkeep."""
    elsewhere("async").kill()
    rides.once.resolve_with(OPERATION, lambda inquiry: Happened({"id": "ch_7"}))
    rides.once.resume(OPERATION, rides.go_on)
    while record_of(rides).state is State.IN_PROGRESS and not record_of(rides).lease_over:
        await asyncio.sleep(0.01)  # the lease of the process that was killed

    def keep() -> None:
        Upkeep(rides.once).run_once()
        rides.once.store.disconnect()

    await asyncio.to_thread(keep)
    assert (rides.rides, rides.charges, record_of(rides).state) == (["ch_7"], 1, State.COMPLETED)
    answer = await rides.send()
    assert (answer.status_code, answer.json()) == (201, {"id": "ch_7"})
    assert answer.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (Happened(1, effect="mail"), "this key has no effect 'mail'; effect 'charge' is in doubt"),
        (Happened(1, effect="ride_created"), "this key has no effect 'ride_created'"),
        (Confirmed(201), "skips every phase after it. Use Happened(result, effect='charge')"),
    ],
)
async def test_verdict_that_does_not_fit_is_refused_and_changes_nothing(
    rides: Rides, elsewhere: StartElsewhere, verdict: Verdict, says: str
) -> None:
    elsewhere("async").kill()
    settlement = await settled(rides, verdict)
    assert (settlement.outcome, settlement.over) == (Outcome.REFUSED, False)
    assert says in (settlement.reason or "")
    record = record_of(rides)
    assert (record.state, record.last_error) == (State.UNKNOWN, "the lease ran out")
    assert rides.once.store.audit(*AT, 10) == []
    assert (await rides.send()).status_code == 409


async def test_confirmed_as_final_skips_the_later_phases(rides: Rides, elsewhere: StartElsewhere) -> None:
    elsewhere("async").kill()
    settlement = await settled(rides, Confirmed(402, {"error": "declined"}, final=True))
    assert settlement.outcome is Outcome.SETTLED
    assert ((await rides.send()).status_code, rides.rides) == (402, [None])


async def test_refuted_lets_the_next_attempt_call_the_effect(rides: Rides, elsewhere: StartElsewhere) -> None:
    elsewhere("async").kill()
    rides.ledger.write_text("")
    assert (await settled(rides, Refuted("nothing was sent"))).outcome is Outcome.SETTLED
    (line,) = rides.once.store.audit(*AT, 10)
    assert (line.event, line.why) == ("not_happened", "effect 'charge' did not happen: nothing was sent")
    assert ((await rides.send()).status_code, rides.charges) == (201, 1)
