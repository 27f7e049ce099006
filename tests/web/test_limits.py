"""Limits: new keys per time, keys per tenant, and look-ups that find nothing. All before any write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from oncekey import Policy
from oncekey.core.rates import Tally
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.swaps import Swap
from oncekey.engine.limiter import Counts
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.limits import Limits, Rates, RatesDown
from oncekey.stores.api import Tallies
from oncekey.stores.registry import open_store
from oncekey.telemetry import events
from oncekey.testing.http.flaky import FlakyStore
from oncekey.testing.http.stack import Stack, request
from tests.web.status_questions import status_of

on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])
LARGE = b"x" * (1024 * 1024 + 1)
THREE = Policy(limit="3/minute", effects="repeatable")


class CountingStore(FlakyStore):
    """Counts what it is asked, and the rows that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.rows_written = 0

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self.asked.append("reserve")
        before = len(self._rows)
        found = super().reserve(batch)
        self.rows_written += len(self._rows) - before
        return found

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self.asked.append("swap")
        self.rows_written += len(batch)
        return super().swap(batch)

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        self.asked.append("read")
        return super().read(keys)

    def tally(self, asked: Tally) -> int:
        self.asked.append("tally")
        if "tally" in self.down:
            raise StoreUnavailable("the test has switched it off")
        return super().tally(asked)

    def since(self, before: int) -> list[str]:
        return self.asked[before:]


@pytest.fixture
def make(make_stack: Any, name: str) -> Callable[..., Stack]:
    def made(policy: Policy = THREE, **options: Any) -> Stack:
        options = {"scope": lambda request: request.headers.get("x-tenant", "ann"), **options}
        options.setdefault("store", CountingStore())
        stack: Stack = make_stack(name, policy=policy, **options)
        return stack

    return made


def ask(stack: Stack, key: str, tenant: str = "ann", **more: Any) -> httpx.Response:
    return stack.post(key, headers={"X-Tenant": tenant}, **more)


def statuses(stack: Stack, count: int, first: int = 1, tenant: str = "ann") -> list[int]:
    return [ask(stack, f"k-{number}", tenant).status_code for number in range(first, first + count)]


# -- the rate of new keys ----------------------------------------------------------------------------------------------


def test_new_keys_beyond_the_rate_get_429_in_every_framework(make: Callable[..., Stack]) -> None:
    stack = make()
    assert statuses(stack, 5) == [201, 201, 201, 429, 429]
    answer = ask(stack, "k-9")
    assert answer.json()["type"] == "urn:oncekey:problem:limited"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (len(stack.store.listing()), stack.runs) == (3, 3)
    assert statuses(stack, 3, tenant="bob") == [201] * 3


@on_both
def test_replay_is_no_new_key(make: Callable[..., Stack]) -> None:
    """It neither counts nor is refused; nor are a retry of a failed request and a mismatch."""
    stack = make()
    assert statuses(stack, 1) == [201]
    assert {ask(stack, "k-1").status_code for _ in range(10)} == {201}
    assert statuses(stack, 3, first=2) == [201, 201, 429]
    assert ask(stack, "k-1").headers["idempotency-replayed"] == "true"
    assert ask(stack, "k-1", body={"amount": 1}).status_code == 422
    other = make(Policy(limit="1/hour", effects="repeatable"))
    assert [ask(other, "k-1", m="return-500").status_code for _ in range(3)] == [500] * 3
    assert other.runs == 3


@on_both
def test_limited_request_costs_one_read_and_no_row(make: Callable[..., Stack]) -> None:
    stack = make()
    store: Any = stack.store
    statuses(stack, 3)
    before, rows = len(store.asked), store.rows_written
    assert statuses(stack, 20, first=4) == [429] * 20
    assert (store.since(before), store.rows_written - rows) == (["read"] * 20, 0)
    before = len(store.asked)
    ask(stack, "k-1")
    assert store.since(before) == ["read"]


@on_both
def test_routes_with_the_same_limit_count_together(make: Callable[..., Stack]) -> None:
    stack = make(routes={"POST /payments/{id}/refunds": Policy(limit="1/hour")})
    assert statuses(stack, 3) == [201] * 3
    refunds = [ask(stack, f"r-{n}", path=f"/payments/{n}/refunds").status_code for n in (1, 2)]
    assert refunds == [201, 429]


@on_both
@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
def test_429_has_the_form_of_each_profile(make: Callable[..., Stack], profile: str) -> None:
    stack = make(Policy(limit="1/hour"), profile=profile)
    ask(stack, "k-1")
    answer = ask(stack, "k-2")
    words = {"ietf": "problem:limited", "stripe": "rate_limit", "governance": "IDEMPOTENCY_LIMIT_REACHED"}
    assert (answer.status_code, words[profile] in answer.text) == (429, True)
    assert 3500 < int(answer.headers["retry-after"]) <= 3600
    assert answer.headers.get("stripe-should-retry") == ("true" if profile == "stripe" else None)
    assert [(event.scope, event.reason) for event in stack.saw(events.TurnedAway)] == [("ann", "limited")]


@on_both
def test_rate_can_be_counted_by_the_store_itself(make: Callable[..., Stack]) -> None:
    """For all processes: a second OnceKey on the same store counts the same keys."""
    options: dict[str, Any] = {"limits": Limits(storage="store"), "store": CountingStore()}
    first, second = make(**options), make(**options)
    assert statuses(first, 2) == [201, 201]
    assert statuses(second, 2, first=3) == [201, 429]
    first.store._clock = lambda: 1_800_000_061.0
    assert statuses(first, 1, first=9) == [201]


@on_both
def test_rate_fails_open_and_says_so(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, closed = make(), make(limits=Limits(rates_fail="closed"))

    def down(*_: Any) -> None:
        raise RatesDown("connection refused")

    monkeypatch.setattr(Rates, "hit", down)
    assert statuses(stack, 6) == [201] * 6
    assert caplog.text.count("nothing is limited meanwhile") == 1
    assert (statuses(closed, 2), closed.runs) == ([503, 503], 0)


@pytest.mark.stores
@on_both
def test_rate_is_counted_in_redis_for_all_processes(make: Callable[..., Stack], redis_url: str) -> None:
    address = redis_url.partition("?")[0]
    first, second = (make(limits=Limits(storage=address)) for _ in range(2))
    assert statuses(first, 2) == [201, 201]
    assert statuses(second, 2, first=3) == [201, 429]


@on_both
def test_redis_that_is_not_there_does_not_stop_payments(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    stack = make(limits=Limits(storage="redis://127.0.0.1:1"))
    assert statuses(stack, 5) == [201] * 5
    assert "the storage of limits does not answer" in caplog.text


# -- how many keys a tenant has ----------------------------------------------------------------------------------------


@on_both
def test_tenant_cannot_have_more_keys_than_the_cap(make: Callable[..., Stack]) -> None:
    stack = make(Policy(), max_active_keys=4)
    assert statuses(stack, 6) == [201] * 4 + [429, 429]
    assert ask(stack, "k-9").headers["retry-after"] == "60"
    assert statuses(stack, 1, tenant="bob") == [201]
    assert ask(stack, "k-1").headers["idempotency-replayed"] == "true"
    assert len(stack.store.listing(scope="ann")) == 4


@on_both
def test_refused_request_at_the_cap_costs_one_read(make: Callable[..., Stack]) -> None:
    """The count is asked for once a second, however many requests are refused in it."""
    stack = make(Policy(), max_active_keys=2)
    assert stack.once.limiter.caps is not None
    stack.once.limiter.caps._clock = lambda: 7.0
    store: Any = stack.store
    statuses(stack, 2)
    assert store.asked == ["read", "tally", "reserve", "swap", "read", "reserve", "swap"]
    before, rows = len(store.asked), store.rows_written
    assert statuses(stack, 50, first=3) == [429] * 50
    assert (store.since(before), store.rows_written - rows) == (["read"] * 50, 0)
    stack.once.limiter.caps._clock = lambda: 8.0
    statuses(stack, 2, first=3)
    assert store.since(before)[50:] == ["read", "tally", "read"]


@on_both
def test_keys_of_all_endpoints_count_for_the_cap(make: Callable[..., Stack]) -> None:
    stack = make(Policy(key_per="endpoint"), max_active_keys=2)
    paths = [f"/payments/{number}/refunds" for number in (1, 2, 3)]
    answers = [ask(stack, "k-1", path=path).status_code for path in paths]
    assert answers == [201, 201, 429]
    assert statuses(stack, 1, tenant="an") == [201]
    assert statuses(stack, 1, tenant="anna") == [201]


@on_both
def test_concurrent_requests_do_not_pass_the_cap(make: Callable[..., Stack]) -> None:
    stack = make(Policy(), max_active_keys=10)
    answers = [stack.start(f"k-{number}") for number in range(60)]
    found = [answer.result(30).status_code for answer in answers]
    # A count that was asked for while a key was on its way may have it twice, until the next count: at worst all keys.
    assert 10 // 2 <= found.count(201) <= 10
    assert len(found) == found.count(201) + found.count(429)
    assert len(stack.store.listing()) == found.count(201)


@on_both
def test_key_that_is_forgotten_makes_room(make: Callable[..., Stack]) -> None:
    stack = make(Policy(), max_active_keys=1)
    assert stack.once.limiter.caps is not None
    stack.once.limiter.caps._recount_seconds = 0.0
    assert statuses(stack, 2) == [201, 429]
    stack.store._rows.clear()
    assert statuses(stack, 2, first=2) == [201, 429]


@on_both
def test_cap_fails_closed_and_the_handler_does_not_run(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    closed = make(Policy(), max_active_keys=4)
    opened = make(Policy(), max_active_keys=4, limits=Limits(caps_fail="open"))
    for stack in (closed, opened):
        stack.store.down.add("tally")
    assert (statuses(closed, 1), closed.runs) == ([503], 0)
    assert statuses(opened, 6) == [201] * 6
    assert "cannot count the keys of a tenant" in caplog.text


@pytest.mark.parametrize("name", ["asgi"])
def test_every_store_with_a_tally_counts_one_tenant(make: Callable[..., Stack], store_url: str) -> None:
    store: Any = open_store(store_url)
    store.migrate()
    options: dict[str, Any] = {"max_active_keys": 3, "store": store}
    if not isinstance(store, Tallies):
        with pytest.raises(ConfigurationError, match=r"this store cannot.*Policy\(limit="):
            make(**options)
        with pytest.raises(ConfigurationError, match=r"this store cannot.*redis:"):
            make(store=store, limits=Limits(storage="store"))
        store.close()
        return
    stack = make(Policy(key_per="endpoint", effects="repeatable"), **options)
    assert statuses(stack, 5) == [201] * 3 + [429] * 2
    assert statuses(stack, 2, tenant="anna") == [201, 201]
    asked = [("ann", 9, None), ("ann", 2, None), ("an", 9, None), ("anna", 9, 3600.0), ("anna", 9, 0.0)]
    assert [store.tally(Tally(*each)) for each in asked] == [3, 2, 0, 2, 0]


def test_count_never_forgets_keys_that_are_on_their_way() -> None:
    """A key that was let pass, and that the store has not answered for, counts beside what the store says."""
    counts = Counts(2, recount_seconds=0.0)

    def take(stored: int) -> bool:
        flow = counts.take("ann")
        assert next(flow) == Tally("ann", 2)
        try:
            flow.send(stored)
        except StopIteration as end:
            return end.value is None
        raise AssertionError("it asks once")

    assert (take(0), take(0), take(0)) == (True, True, False)
    counts.taken("ann")
    assert not take(1)
    counts.taken("ann")
    assert take(0)


# -- look-ups that find nothing ----------------------------------------------------------------------------------------


def look(stack: Stack, key: str, tenant: str = "ann") -> httpx.Response:
    return status_of(stack, key, {"X-Tenant": tenant})


@on_both
def test_guessing_keys_at_the_status_endpoint_is_limited(make: Callable[..., Stack]) -> None:
    stack = make(Policy(), limits=Limits(lookups="3/hour"))
    store: Any = stack.store
    ask(stack, "k-1")
    assert [look(stack, "k-1").status_code for _ in range(10)] == [201] * 10
    assert [look(stack, f"g-{n}").status_code for n in range(3)] == [404] * 3
    before = len(store.asked)
    limited = [look(stack, key) for key in ("g-4", "k-1")]
    assert [answer.status_code for answer in limited] == [429, 429], "a hit would tell the guesser that it is one"
    assert store.since(before) == []
    assert int(limited[0].headers["retry-after"]) > 3500
    turned_away = [(event.scope, event.operation, event.reason) for event in stack.saw(events.TurnedAway)]
    assert [(scope, reason) for scope, _, reason in turned_away] == [("ann", "limited")] * 2
    assert {operation.partition(" ")[0] for _, operation, _ in turned_away} == {"GET"}
    assert look(stack, "k-1", "bob").status_code == 404
    assert ask(stack, "k-1").status_code == 201, "requests are not look-ups"


@on_both
def test_lookups_fail_open(make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = make(Policy(), limits=Limits(lookups="1/hour"))
    closed = make(Policy(), limits=Limits(lookups="1/hour", rates_fail="closed"))

    def down(*_: Any, **__: Any) -> None:
        raise RatesDown("connection refused")

    monkeypatch.setattr(Rates, "hit", down)
    monkeypatch.setattr(Rates, "full", down)
    assert [look(opened, "g").status_code for _ in range(3)] == [404] * 3
    with opened.once.limiter.in_flight.entered("ann"):
        assert look(opened, "g").status_code == 404, "nor are those in flight limited"
    assert [look(closed, "g").status_code for _ in range(3)] == [503] * 3


# -- a hostile tenant --------------------------------------------------------------------------------------------------

ODD_HEADERS: list[dict[str, str]] = [
    {},
    {"Idempotency-Key": ""},
    {"Idempotency-Key": "a,b"},
    {"Idempotency-Key": "k" * 300},
]


@on_both
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.faults)])
def test_hostile_requests_cost_exactly_one_read_or_nothing(make: Callable[..., Stack], count: int) -> None:
    """New keys beyond the limit and the cap, guessed keys, huge bodies and odd headers of one tenant; what each costs
    is counted (test_limit_statements.py: in statements of a database). Another tenant goes on."""
    stack = make(Policy(limit="20/hour"), max_active_keys=15, limits=Limits(lookups="10/hour"))
    assert stack.once.limiter.caps is not None
    stack.once.limiter.caps._clock = lambda: 7.0
    store: Any = stack.store
    assert statuses(stack, 25) == [201] * 15 + [429] * 10
    assert [look(stack, f"g-{n}").status_code for n in range(11)] == [404] * 10 + [429]
    before, rows = len(store.asked), store.rows_written
    new = [request(f"n-{n}", headers={"X-Tenant": "ann"}) for n in range(count // 4)]
    large = [request(f"l-{n}", headers={"X-Tenant": "ann"}, content=LARGE) for n in range(count // 4)]
    odd = [request(None, headers={"X-Tenant": "ann", **ODD_HEADERS[n % 4]}) for n in range(count // 4)]
    assert {answer.status_code for answer in stack.together(new)} == {429}
    assert (store.since(before), store.rows_written - rows) == (["read"] * (count // 4), 0)
    before = len(store.asked)
    assert {answer.status_code for answer in stack.together(large)} == {413}
    assert {answer.status_code for answer in stack.together(odd)} == {400}
    assert {look(stack, f"h-{n}").status_code for n in range(count // 4)} == {429}
    assert (store.since(before), store.rows_written - rows) == ([], 0)
    assert len(store.listing(scope="ann", limit=count)) == 15
    assert statuses(stack, 3, tenant="bob") == [201] * 3
