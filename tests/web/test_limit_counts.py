"""What counts for a limit: one key once, however many requests bring it, and no key that left no row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from oncekey import OnceKey, Policy
from oncekey.core.decision import TurnedAway
from oncekey.core.rates import Tally
from oncekey.core.record import Found, Record, Reservation
from oncekey.engine import limiter
from oncekey.engine.admission import Admission
from oncekey.engine.flows import Call, Flow, Pause
from oncekey.engine.limiter import Counts
from oncekey.limits import Limits
from oncekey.testing.http.stack import Stack
from tests.web.test_limits import CountingStore

KINDS = ("memory", "store", "cap")
on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])
each_kind = pytest.mark.parametrize("kind", KINDS)


class SlowReads(CountingStore):
    """Requests that arrive together read the row before one of them has written it."""

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        found = super().read(keys)
        time.sleep(0.05)
        return found


def options(kind: str, number: int) -> dict[str, Any]:
    if kind == "cap":
        return {"policy": Policy(effects="repeatable"), "max_active_keys": number}
    limits = Limits(storage="store" if kind == "store" else "memory://")
    return {"policy": Policy(effects="repeatable", limit=f"{number}/minute"), "limits": limits}


# -- requests that arrive together, driven by hand ---------------------------------------------------------------------


class Asked:
    """One request at the limits: what it asks the store, one question after the other."""

    def __init__(self, once: OnceKey, key: str = "k-1") -> None:
        policy = once.default_policy
        route = once.routes.match("POST", "/payments")
        assert route is not None
        self.wanted: Reservation = once.reservation(
            route,
            tenant="ann",
            key=key,
            owner=once.engine.owners.new(),
            parts=("POST", "/payments", b"", None, b"", lambda names: ()),
            lines=(),
        )
        self.flow: Flow[Found | TurnedAway] = Admission(policy, once.limiter, "ann").first_answer(self.wanted)
        self.at: Any = next(self.flow)
        self.answer: Found | TurnedAway | None = None
        self.calls = 0

    def send(self, answer: Any) -> None:
        """Answer a question. Calls into the limits are made at once."""
        try:
            self.at = self.flow.send(answer)
            while isinstance(self.at, Call):
                self.calls += 1
                self.at = self.flow.send(self.at.do())
        except StopIteration as end:
            self.at, self.answer = None, end.value


@pytest.fixture
def made(make_stack: Any, kind: str) -> OnceKey:
    stack: Stack = make_stack("asgi", store=CountingStore(), **options(kind, 1))
    return stack.once


@each_kind
def test_requests_that_arrive_together_with_one_key_are_counted_once(made: OnceKey, kind: str) -> None:
    requests = [Asked(made) for _ in range(8)]
    for each in requests:
        each.send(None)  # no row yet
        if isinstance(each.at, Tally):
            each.send(0)
    assert [type(each.at) for each in requests] == [Reservation] * 8
    other = Asked(made, "k-2")
    other.send(None)
    if isinstance(other.at, Tally):
        other.send(0)
        while isinstance(other.at, Tally):  # when one fits again
            other.send(0)
    assert isinstance(other.answer, TurnedAway), "the one place is taken"


@each_kind
def test_duplicate_of_a_refused_key_is_not_reserved(made: OnceKey, kind: str) -> None:
    """It waits while the first one is being counted, and then asks for itself."""
    if kind == "memory":
        taken = Asked(made, "k-0")
        taken.send(None)
        first, second = Asked(made), Asked(made)
        first.send(None)
        second.send(None)
        assert isinstance(first.answer, TurnedAway)
        assert isinstance(second.answer, TurnedAway)
        return
    first, second = Asked(made), Asked(made)
    first.send(None)
    second.send(None)
    assert (type(first.at), type(second.at)) == (Tally, Pause)
    while isinstance(first.at, Tally):
        first.send(1)
    assert isinstance(first.answer, TurnedAway)
    second.send(None)
    while isinstance(second.at, Tally):
        second.send(1)
    assert isinstance(second.answer, TurnedAway)


def row_of(asked: Asked) -> Found:
    """The row as the store made it for this request."""
    (found,) = CountingStore().reserve([asked.wanted])
    return found


@pytest.mark.parametrize("kind", ["memory"])
def test_request_that_was_not_counted_and_made_the_row_ends_the_sharing(made: OnceKey) -> None:
    """The counted one had discarded its row. Otherwise requests that overlap for ever would be counted once."""
    first, second, third = Asked(made), Asked(made), Asked(made)
    first.send(None)
    first.send(row_of(first))
    second.send(None)
    second.send(row_of(second))
    third.send(None)
    assert isinstance(third.answer, TurnedAway)
    assert not made.limiter.arrivals._by_key


def test_key_that_another_request_made_takes_no_place() -> None:
    counts = Counts(1, clock=lambda: 7.0)

    def take() -> float | None:
        flow = counts.take("ann")
        try:
            next(flow)
            flow.send(0)
        except StopIteration as end:
            answer: float | None = end.value
            return answer
        raise AssertionError("it asks once")

    assert take() is None
    assert take() == 1.0, "the key on its way may be discarded"
    counts.taken("ann", made=False)
    assert take() is None
    counts.taken("ann", made=True)
    assert take() == 60.0


def test_count_of_a_tenant_that_is_being_asked_for_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key would be on its way in a count that nothing reads, and the tenant would get a place too many."""
    monkeypatch.setattr(limiter, "MAX_TENANTS", 1)
    counts = Counts(1, clock=lambda: 7.0)
    first, other = counts.take("ann"), counts.take("bob")
    assert (next(first), next(other)) == (Tally("ann", 1), Tally("bob", 1))
    with pytest.raises(StopIteration) as end:
        first.send(0)
    assert end.value.value is None
    with pytest.raises(StopIteration) as end:
        next(counts.take("ann"))
    assert end.value.value == 1.0, "the place is taken"
    other.close()
    counts.taken("ann")
    counts.discarded("eve")
    assert list(counts._tenants) == ["eve"], "idle counts are forgotten"


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@on_both
@each_kind
def test_duplicates_in_flight_are_409_and_leave_the_other_places(make_stack: Any, name: str, kind: str) -> None:
    stack: Stack = make_stack(name, store=SlowReads(), **options(kind, 4))
    answers = [stack.start("same", "slow") for _ in range(8)]
    assert stack.payments.entered.wait(30)
    while sum(answer.done() for answer in answers) < 7:
        time.sleep(0.01)
    stack.payments.go.set()
    assert Counter(answer.result(30).status_code for answer in answers) == {201: 1, 409: 7}
    assert [stack.post(f"k-{number}").status_code for number in range(4)] == [201] * 3 + [429]
    assert not stack.once.limiter.arrivals._by_key


@pytest.mark.parametrize(("name", "asked"), [("starlette-async", {"path": "/nowhere"}), ("wsgi", {"m": "refused"})])
def test_request_that_leaves_no_row_makes_room_under_the_cap_at_once(
    make_stack: Any, name: str, asked: dict[str, Any]
) -> None:
    store = CountingStore()
    stack: Stack = make_stack(name, store=store, **options("cap", 2))
    assert stack.once.limiter.caps is not None
    stack.once.limiter.caps._clock = lambda: 7.0
    assert 429 not in [stack.post(f"r-{number}", **asked).status_code for number in range(5)]
    assert not stack.rows()
    assert [stack.post(f"k-{number}").status_code for number in range(3)] == [201, 201, 429]
    before = len(store.asked)
    assert [stack.post(f"n-{number}").status_code for number in range(5)] == [429] * 5
    assert store.since(before) == ["read"] * 5, "without a discarded key, nothing is counted again"


@pytest.mark.parametrize("name", ["asgi"])
def test_retry_after_of_a_rate_in_the_store_is_when_the_next_key_fits(make_stack: Any, name: str) -> None:
    store: Any = CountingStore()
    stack: Stack = make_stack(name, store=store, **options("store", 3))
    begun = store._clock()
    for number, after in enumerate((0, 20, 40)):
        store._clock = lambda after=after: begun + after
        assert stack.post(f"k-{number}").status_code == 201
    store._clock = lambda: begun + 45
    assert stack.post("k-9").headers["retry-after"] in ("15", "16")
    before = len(store.asked)
    assert stack.post("k-9").headers["retry-after"] in ("15", "16")
    assert store.since(before) == ["read", "tally"], "what was found is remembered"
    store._clock = lambda: begun + 60.5
    assert stack.post("k-9").status_code == 201
