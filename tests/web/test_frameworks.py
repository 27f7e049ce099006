"""One HTTP suite over every framework: the same requests, the same states, and the same bytes through all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest

from oncekey import NotAuthenticated, Policy
from oncekey.core.policy import STORED_HEADERS
from oncekey.telemetry import events
from tests.web.frameworks import (
    ASGI_STACKS,
    MAX_RESPONSE,
    ONE,
    PAYMENT,
    RAW,
    SECONDS,
    STACKS,
    Stack,
    request,
    until,
)

MakeStack = Callable[..., Stack]
EFFECTS = ("external", "transactional", "phased", "repeatable")
MARKER = ("idempotency-replayed", "true")
OURS = {"idempotency-key", "idempotency-expires", "content-length"}


@pytest.fixture(params=STACKS)
def name(request: pytest.FixtureRequest) -> str:
    """Each framework in turn."""
    framework: str = request.param
    return framework


@pytest.fixture
def make() -> Iterator[MakeStack]:
    """Makes protected apps; all of them are closed at the end."""
    made: list[Stack] = []

    def make(*args: Any, **options: Any) -> Stack:
        made.append(Stack(*args, **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.fixture
def stack(name: str, make: MakeStack) -> Stack:
    """The app of one framework, as it is by default."""
    return make(name)


def lines(response: httpx.Response) -> list[tuple[str, str]]:
    """The headers as they are on the wire: order between different names means nothing in HTTP, all else does."""
    return sorted((name.decode().lower(), value.decode()) for name, value in response.headers.raw)


def stored_lines(response: httpx.Response) -> list[tuple[str, str]]:
    """Those of a first response that its replay must repeat."""
    return [line for line in lines(response) if line[0] in STORED_HEADERS | OURS]


def replays(first: httpx.Response, second: httpx.Response) -> bool:
    """Whether the second is the first again, byte for byte, and says so."""
    same = (first.status_code, first.content) == (second.status_code, second.content)
    return same and lines(second) == sorted([*stored_lines(first), MARKER])


def problem(response: httpx.Response) -> str:
    """Which of our problems it is."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    return response.json()["type"].rpartition(":")[2]


def state_of(stack: Stack, key: str = "k-1") -> str | None:
    record = stack.record(key)
    return record.state.value if record else None


# ---------------------------------------------------------------- the same request twice


def test_the_replay_repeats_the_first_byte_for_byte(stack: Stack) -> None:
    """The second answer has the first one's status, body, allow-listed headers, key, expiry and length."""
    first, second, third = stack.post(), stack.post(), stack.post()
    assert first.status_code == 201
    assert {"content-type", "location", "etag", "cache-control", *OURS} <= {name for name, _ in stored_lines(first)}
    assert first.headers["set-cookie"]
    assert first.headers["x-trace"]
    assert "idempotency-replayed" not in first.headers
    assert replays(first, second)
    assert second.headers.raw == third.headers.raw
    assert (stack.runs, state_of(stack)) == (1, "completed")


def test_the_replay_is_these_very_bytes(stack: Stack) -> None:
    """What a replay looks like is written down here, and no framework adds or drops a thing."""
    stack.post("key-of-mine")
    again = stack.post("key-of-mine")
    assert (again.status_code, again.content) == (201, b'{"id":"pay_1","status":"paid"}')
    assert lines(again) == [
        ("cache-control", "no-store"),
        ("content-length", "30"),
        ("content-type", "application/json"),
        ("etag", '"1"'),
        ("idempotency-expires", "Sat, 16 Jan 2027 08:00:00 GMT"),
        ("idempotency-key", "key-of-mine"),
        ("idempotency-replayed", "true"),
        ("location", "/payments/pay_1"),
    ]


def _twice(stack: Stack, **asked: Any) -> list[httpx.Response]:
    return [stack.post(**asked), stack.post(**asked)]


def _while_in_flight(stack: Stack, **asked: Any) -> list[httpx.Response]:
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    answers = [stack.post(m="slow", **asked)]
    stack.payments.go.set()
    return [first.result(SECONDS), *answers]


def _after_the_first(stack: Stack, **asked: Any) -> list[httpx.Response]:
    return [stack.post(), stack.post(**asked)]


def _store_down(stack: Stack) -> list[httpx.Response]:
    stack.store.down = {"reserve"}
    return [stack.post()]


def _not_stored(stack: Stack, **asked: Any) -> list[httpx.Response]:
    stack.store.down = {"swap"}
    answers = [stack.post(**asked)]
    stack.store.down = set()
    return answers


def _robbed(stack: Stack) -> list[httpx.Response]:
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    stack.store.steal()
    stack.payments.go.set()
    return [first.result(SECONDS)]


SCENARIOS: dict[str, Callable[[Stack], list[httpx.Response]]] = {
    "completed": _twice,
    "streamed": lambda stack: _twice(stack, m="stream"),
    "a 4xx": lambda stack: _twice(stack, m="return-410"),
    "no content": lambda stack: _twice(stack, m="204"),
    "too large": lambda stack: _twice(stack, m="large"),
    "a large stream": lambda stack: _twice(stack, m="stream-large"),
    "an event stream": lambda stack: _twice(stack, m="events"),
    "not executed": lambda stack: _twice(stack, m="not-executed"),
    "outcome unknown": lambda stack: _twice(stack, m="unknown"),
    "refused": lambda stack: _twice(stack, m="refused"),
    "in flight": _while_in_flight,
    "in flight, another body": lambda stack: _while_in_flight(stack, body={"amount": 1}),
    "another body": lambda stack: _after_the_first(stack, body={"amount": 1}),
    "no key": lambda stack: [stack.post(None)],
    "a stream that breaks": lambda stack: _twice(stack, m="stream-broken")[1:],
    "a bad key": lambda stack: [stack.post("two words")],
    "two keys": lambda stack: [stack.post(["k-1", "k-2"])],
    "a large body": lambda stack: [stack.post(content=b"x" * (2 * 1024 * 1024))],
    "store down": _store_down,
    "not stored": _not_stored,
    "not stored, and not executed": lambda stack: _not_stored(stack, m="not-executed"),
    "lease lost": _robbed,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_framework_says_the_same_bytes(make: MakeStack, scenario: str) -> None:
    """In each situation the status, all headers and the body are the same through all frameworks."""
    said: dict[str, list[str]] = {}
    for name in STACKS:
        answers = SCENARIOS[scenario](make(name))
        said.setdefault(repr([(each.status_code, lines(each), each.content) for each in answers]), []).append(name)
    assert len(said) == 1, "\n\n".join(f"{names} say {what}" for what, names in said.items())


# ---------------------------------------------------------------- another request under the same key


@pytest.mark.parametrize(
    "other",
    [
        {"body": PAYMENT | {"amount": 2000}},
        {"path": "/payments/7/refunds"},
        {"m": "return-410"},
        {"content": b"amount=1000", "headers": {"content-type": "text/plain"}},
    ],
    ids=["body", "path", "query", "media-type"],
)
def test_another_request_under_the_same_key_is_422(stack: Stack, other: dict[str, Any]) -> None:
    """A key that comes back with a different request is refused, and the first answer stays."""
    first = stack.post()
    refused = stack.post(**other)
    assert (refused.status_code, problem(refused)) == (422, "mismatch")
    assert stack.runs == 1
    assert replays(first, stack.post())


@pytest.mark.parametrize(
    "same",
    [b'{"currency":"EUR","amount":1000}', b'{ "amount": 1000,\n  "currency": "EUR" }'],
    ids=["order", "white-space"],
)
def test_the_same_json_in_another_spelling_replays(stack: Stack, same: bytes) -> None:
    """Key order and white space make no other request."""
    first = stack.post()
    assert replays(first, stack.post(content=same, headers={"content-type": "application/json"}))
    assert stack.runs == 1


@pytest.mark.parametrize("in_flight", ["conflict", "wait"])
def test_another_body_is_422_also_while_the_first_is_in_flight(name: str, make: MakeStack, in_flight: Any) -> None:
    """422 wins over 409 and over waiting: whoever misuses a key learns that at once."""
    stack = make(name, policy=Policy(in_flight=in_flight))
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    refused = stack.post(m="slow", body=PAYMENT | {"amount": 2000})
    assert (refused.status_code, problem(refused)) == (422, "mismatch")
    assert "retry-after" not in refused.headers
    stack.payments.go.set()
    assert first.result(SECONDS).status_code == 201
    assert stack.runs == 1


# ---------------------------------------------------------------- at once


def test_in_flight_is_409_with_retry_after_and_then_a_replay(name: str, make: MakeStack) -> None:
    """While the first runs, a duplicate is told when to come again; then it gets the first one's answer."""
    stack = make(name, policy=Policy(retry_after=timedelta(seconds=3)))
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    busy = stack.post(m="slow")
    assert (busy.status_code, problem(busy)) == (409, "in-flight")
    assert busy.headers["retry-after"] == "3"
    assert busy.headers["idempotency-key"] == "k-1"
    stack.payments.go.set()
    assert replays(first.result(SECONDS), stack.post(m="slow"))
    assert stack.runs == 1


def test_50_at_once_have_one_effect(stack: Stack) -> None:
    """Of 50 duplicates at the same moment one runs, and 49 are told to come again."""
    answers = [stack.start(m="slow") for _ in range(50)]
    until(lambda: sum(answer.done() for answer in answers) == 49, "49 answers while the first still runs")
    stack.payments.go.set()
    statuses = Counter(answer.result(SECONDS).status_code for answer in answers)
    assert statuses == {201: 1, 409: 49}
    assert stack.runs == 1


def test_waiting_duplicates_get_the_first_ones_answer(name: str, make: MakeStack) -> None:
    """With ``in_flight="wait"`` a duplicate is held until the first is done, and gets its bytes."""
    stack = make(name, policy=Policy(in_flight="wait"))
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    others = [stack.start(m="slow") for _ in range(5)]
    until(lambda: stack.once.engine._waiters.get((ONE, "k-1")), "somebody waits")
    assert not any(other.done() for other in others)
    stack.payments.go.set()
    assert all(replays(first.result(SECONDS), other.result(SECONDS)) for other in others)
    assert stack.runs == 1


def test_waiting_ends_with_a_409(name: str, make: MakeStack) -> None:
    """Who waits gives up after the policy's time, and the first request is not disturbed."""
    stack = make(name, policy=Policy(in_flight="wait", wait=timedelta(seconds=0.05)))
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    late = stack.post(m="slow")
    assert (late.status_code, problem(late)) == (409, "in-flight")
    assert len(stack.saw(events.WaitedOut)) == 1
    stack.payments.go.set()
    assert first.result(SECONDS).status_code == 201
    assert stack.runs == 1


# ---------------------------------------------------------------- whose key


def by_user(asked: Any) -> str:
    tenant: str = asked.headers.get("x-user", "")
    if not tenant:
        raise NotAuthenticated("say who you are")
    return tenant


async def by_user_async(asked: Any) -> str:
    return by_user(asked)


def test_two_tenants_with_one_key_do_not_meet(name: str, make: MakeStack) -> None:
    """The same key of two tenants is two keys, with two effects and two answers."""
    stack = make(name, scope=by_user)
    ann: dict[str, Any] = {"headers": {"x-user": "ann"}}
    bob: dict[str, Any] = {"headers": {"x-user": "bob"}, "body": {"amount": 5}}
    of_ann, of_bob = stack.post(**ann), stack.post(**bob)
    assert (of_ann.status_code, of_bob.status_code, stack.runs) == (201, 201, 2)
    assert of_ann.content != of_bob.content
    assert replays(of_ann, stack.post(**ann))
    assert replays(of_bob, stack.post(**bob))
    assert stack.record("k-1", "ann") != stack.record("k-1", "bob")


def test_nobody_is_401_before_any_look_up(name: str, make: MakeStack) -> None:
    """A caller that is nobody gets 401, also for a key that has an answer, and the store is not asked."""
    stack = make(name, scope=by_user)
    stack.post(headers={"x-user": "ann"})
    stack.store.down = {"reserve", "read", "swap"}
    nobody = stack.post()
    assert (nobody.status_code, problem(nobody)) == (401, "not-authenticated")
    assert nobody.headers["www-authenticate"]
    assert stack.runs == 1


@pytest.mark.parametrize("name", ASGI_STACKS)
def test_the_scope_function_may_be_async(name: str, make: MakeStack) -> None:
    """In an ASGI app the tenant may be looked up asynchronously."""
    stack = make(name, scope=by_user_async)
    assert replays(stack.post(headers={"x-user": "ann"}), stack.post(headers={"x-user": "ann"}))
    assert stack.record("k-1", "ann") is not None


# ---------------------------------------------------------------- which requests need a key


def test_no_key_is_400(stack: Stack) -> None:
    """A state-changing request without a key is refused, says what to send, and leaves no trace."""
    answer = stack.post(None)
    assert (answer.status_code, problem(answer)) == (400, "key-missing")
    assert 'rel="describedby"' in answer.headers["link"]
    assert (stack.runs, len(stack.store._rows)) == (0, 0)


@pytest.mark.parametrize(
    "key",
    ["", " ", "two words", '"unterminated', "k" * 256, ["k-1", "k-2"], ["k-1", "k-1"]],
    ids=["empty", "blank", "space", "unterminated", "long", "two", "twice-the-same"],
)
def test_a_malformed_key_is_400(stack: Stack, key: Any) -> None:
    """A key that is none is refused before the store is asked, and the handler does not run."""
    answer = stack.post(key)
    assert (answer.status_code, problem(answer)) == (400, "key-malformed")
    assert (stack.runs, len(stack.store._rows)) == (0, 0)


def test_the_quoted_and_the_bare_key_are_the_same(stack: Stack) -> None:
    """Each answer repeats the key as the client spelt it, and both name one operation."""
    bare, quoted = stack.post("k-1"), stack.post('"k-1"')
    assert quoted.headers["idempotency-key"] == '"k-1"'
    assert (bare.content, stack.runs) == (quoted.content, 1)


def test_get_passes_untouched(stack: Stack) -> None:
    """A GET runs every time, with a key and without, and neither carries our headers nor leaves a row."""
    for key in (None, "k-1", "k-1"):
        answer = stack.post(key, method="GET", path="/status")
        assert (answer.status_code, answer.content) == (200, b'{"operation":null}')
        assert not any(line[0].startswith("idempotency") for line in lines(answer))
    assert stack.store._rows == {}


def test_a_body_over_the_cap_is_413(name: str, make: MakeStack) -> None:
    """A body that is too large to hash is refused, never let past, and leaves the key unused."""
    stack = make(name, policy=Policy(max_request_bytes=100))
    refused = stack.post(content=b"x" * 101)
    assert (refused.status_code, problem(refused)) == (413, "body-too-large")
    assert (stack.runs, state_of(stack)) == (0, None)
    assert stack.post(content=b"x" * 100).status_code == 201


# ---------------------------------------------------------------- what cannot be stored


@pytest.mark.parametrize("m", ["large", "stream-large"])
def test_too_large_an_answer_leaves_a_tombstone(stack: Stack, m: str) -> None:
    """The first answer arrives whole; the retry gets its status, its stored headers and a note, and does not run."""
    first, second = stack.post(m=m), stack.post(m=m)
    assert first.status_code == second.status_code == 201
    assert len(first.content) > MAX_RESPONSE
    assert first.headers["idempotency-expires"] == second.headers["idempotency-expires"]
    assert second.json()["type"] == "urn:oncekey:problem:body-not-kept"
    assert second.headers["location"] == first.headers["location"] == "/payments/pay_1"
    assert second.headers["content-type"] == "application/json"
    assert second.headers["idempotency-replayed"] == "true"
    assert (stack.runs, state_of(stack)) == (1, "completed")
    assert len(stack.saw(events.Tombstoned)) == 1


def test_an_event_stream_leaves_a_tombstone(stack: Stack) -> None:
    """Events are passed on as they come, so they are not kept, and the retry learns that it is done."""
    first, second = stack.post(m="events"), stack.post(m="events")
    assert first.content == b"data: 1\n\ndata: 2\n\n"
    assert second.json()["type"] == "urn:oncekey:problem:body-not-kept"
    assert (stack.runs, state_of(stack)) == (1, "completed")


def test_a_small_stream_is_stored_whole(stack: Stack) -> None:
    """What was streamed in pieces and fits is replayed byte for byte, with its length."""
    first, second = stack.post(m="stream"), stack.post(m="stream")
    assert first.content == b'{"id":"pay_1"}'
    assert first.headers["content-length"] == "14"
    assert replays(first, second)
    assert stack.runs == 1


def test_a_204_replays_without_a_body(stack: Stack) -> None:
    """An answer without a body is stored and replayed without one, and without a length."""
    first, second = stack.post(m="204"), stack.post(m="204")
    assert (first.status_code, second.status_code, second.content) == (204, 204, b"")
    assert "content-length" not in first.headers
    assert replays(first, second)
    assert stack.runs == 1


# ---------------------------------------------------------------- how handlers end (DESIGN, section 4)

RAISED = {
    "external": "unknown",
    "transactional": "failed_retryable",
    "phased": "failed_retryable",
    "repeatable": "failed_retryable",
}
MODES = {
    # how the handler ends: the status of its answer, and the state or the column of section 4
    "raise": (500, "raised"),
    "abort-500": (500, "raised"),
    "stream-broken": (500, "raised"),
    "abort-503": (503, "raised"),
    "return-500": (500, "returned"),
    "return-503": (503, "returned"),
    "return-410": (410, "failed"),
    "abort-410": (410, "failed"),
    "return-429": (429, "failed_retryable"),
    "abort-429": (429, "failed_retryable"),
    "not-executed": (503, "failed_retryable"),
    "unknown": (409, "unknown"),
    "refused": (400, None),
    "ok": (201, "completed"),
    "stream": (201, "completed"),
    "204": (204, "completed"),
}


def everywhere(modes: Iterable[str]) -> list[tuple[str, str]]:
    """Each framework with each mode; without a framework there is no HTTP exception to raise."""
    listed = list(modes)
    return [(name, m) for name in STACKS for m in listed if not (m.startswith("abort") and name in RAW)]


def design(name: str, effects: str, column: str | None) -> str | None:
    """The state that section 4 asks for."""
    if column == "returned":
        # "Where raised and returned cannot be told apart, it counts as raised."
        column = "raised" if name in RAW else "failed_retryable"
    return RAISED[effects] if column == "raised" else column


@pytest.mark.parametrize(
    ("name", "m", "effects"),
    [
        (name, m, effects)
        for name, m in everywhere(MODES)
        for effects in EFFECTS
        # What succeeded has succeeded wherever its effects live: once is enough.
        if effects == "external" or MODES[m][1] != "completed"
    ],
)
def test_every_ending_is_what_the_design_says(name: str, make: MakeStack, m: str, effects: str) -> None:
    """How a handler ended decides the state of its key, and the state decides what the retry gets."""
    status, column = MODES[m]
    stack = make(name, effects=effects)
    first = stack.post(m=m)
    assert first.status_code == status
    state = design(name, effects, column)
    assert state_of(stack) == state
    attempts = [run.attempt for run in stack.payments.runs]
    assert attempts == [1]
    second = stack.post(m=m)
    match state:
        case "completed" | "failed":
            assert replays(first, second)
            assert stack.runs == 1
        case "unknown":
            assert (second.status_code, problem(second)) == (409, "outcome-unknown")
            assert "Keep the key" in second.json()["detail"]
            assert stack.runs == 1
        case "failed_retryable":
            assert second.status_code == status
            assert [run.attempt for run in stack.payments.runs] == [1, 2]
        case None:
            assert second.status_code == status
            assert [run.attempt for run in stack.payments.runs] == [1, 1]


@pytest.mark.parametrize(
    ("name", "m"), everywhere(m for m in MODES if m not in ("ok", "refused", "204", "stream", "stream-broken"))
)
def test_the_answer_of_a_released_key_is_stored_when_it_succeeds(name: str, make: MakeStack, m: str) -> None:
    """A retry of a failure that left nothing behind runs as attempt 2, under the same downstream key, and stays."""
    stack = make(name, effects="repeatable")
    stack.post(m=m)
    released = state_of(stack) == "failed_retryable"
    assert released == (m not in ("return-410", "abort-410", "unknown"))
    stack.payments.healed = True
    second, third = stack.post(m=m), stack.post(m=m)
    if released:
        assert second.status_code == 201
        assert replays(second, third)
        assert [run.attempt for run in stack.payments.runs] == [1, 2]
        assert len({run.downstream_key for run in stack.payments.runs}) == 1
    else:
        assert stack.runs == 1


UNDECIDED = [
    *(f"return-{status}" for status in (401, 403, 408, 425, 429)),
    *(f"abort-{status}" for status in (401, 403, 408)),
]


@pytest.mark.parametrize(("name", "m"), everywhere(UNDECIDED))
def test_a_4xx_that_says_nothing_of_the_operation_is_not_final(name: str, make: MakeStack, m: str) -> None:
    """Who asked, how fast and how early may be better next time: the key can be used again."""
    stack = make(name)
    assert stack.post(m=m).status_code == int(m[-3:])
    assert state_of(stack) == "failed_retryable"


@pytest.mark.parametrize(("on_server_error", "state"), [
    ("replay", "failed"), ("unknown", "unknown"), ("retry", "failed_retryable"),
])  # fmt: skip
def test_a_route_may_say_what_a_returned_5xx_means(
    name: str, make: MakeStack, on_server_error: Any, state: str
) -> None:
    """``on_server_error`` overrides what a returned 5xx means, whatever the effects."""
    stack = make(name, policy=Policy(on_server_error=on_server_error))
    first = stack.post(m="return-500")
    assert (first.status_code, state_of(stack)) == (500, state)
    second = stack.post(m="return-500")
    assert replays(first, second) == (on_server_error == "replay")
    assert stack.runs == (2 if on_server_error == "retry" else 1)


@pytest.mark.parametrize("on_server_error", ["replay", "retry"])
@pytest.mark.parametrize(("name", "m"), everywhere(["raise", "abort-503"]))
def test_what_a_returned_5xx_means_says_nothing_of_a_raised_one(
    name: str, make: MakeStack, on_server_error: Any, m: str
) -> None:
    """An external handler that raised may have charged somebody, also where a returned 5xx is declared harmless."""
    stack = make(name, policy=Policy(on_server_error=on_server_error))
    stack.post(m=m)
    assert state_of(stack) == "unknown"
    assert problem(stack.post(m=m)) == "outcome-unknown"
    assert stack.runs == 1


def test_a_refused_request_leaves_its_key_for_another_one(stack: Stack) -> None:
    """Refused before the operation began: the corrected request may come with the same key."""
    refused = stack.post(m="refused")
    assert (refused.status_code, problem(refused)) == (400, "refused")
    assert "not today" in refused.json()["detail"]
    assert stack.post(body={"amount": 2}).status_code == 201


def test_a_refused_retry_gives_the_key_back_as_it_was(name: str, make: MakeStack) -> None:
    """A later attempt has a history: it is released, not forgotten, and its fingerprint stays."""
    stack = make(name, effects="repeatable")
    stack.payments.raising = True
    stack.post(m="refused")
    assert state_of(stack) == "failed_retryable"
    stack.payments.raising = False
    assert stack.post(m="refused").status_code == 400
    assert state_of(stack) == "failed_retryable"
    assert problem(stack.post(m="refused", body={"amount": 2})) == "mismatch"


def test_refused_after_the_operation_began_does_not_free_the_key(stack: Stack) -> None:
    """Whoever used a verb has begun: Refused comes too late then, and the key stays taken."""
    first, second = stack.post(m="refused-410"), stack.post(m="refused-410")
    assert (first.status_code, problem(first), state_of(stack)) == (410, "refused", "failed")
    assert replays(first, second)
    assert stack.runs == 1


def test_refused_too_late_with_an_undecided_status_is_not_final(stack: Stack) -> None:
    """A 429 says nothing about the operation, also where Refused comes too late: the key can be used again."""
    assert stack.post(m="refused-429").status_code == 429
    assert state_of(stack) == "failed_retryable"


# ---------------------------------------------------------------- what never reached a handler


@pytest.mark.parametrize(
    ("asked", "status"), [({"path": "/nowhere"}, 404), ({"method": "PATCH"}, 405)], ids=["404", "405"]
)
def test_a_request_without_a_handler(stack: Stack, asked: dict[str, Any], status: int) -> None:
    """Where the framework turns it away, the key is not used up; without one to tell, the 4xx is final and replayed."""
    first = stack.post(**asked)
    assert first.status_code == status
    assert stack.runs == 0
    if not stack.name.startswith(("asgi", "wsgi")):
        assert state_of(stack) is None
        assert stack.post().status_code == 201
    else:
        # A raw app's 404 is its answer like any other.
        assert state_of(stack) == "failed"
        assert replays(first, stack.post(**asked))


# ---------------------------------------------------------------- what a handler sees of itself


def test_the_handler_sees_its_operation(name: str, make: MakeStack) -> None:
    """``current()`` has key and attempt in async handlers and in sync ones, which run in another thread."""
    stack = make(name, effects="repeatable")
    stack.post('"k-1"', m="return-503")
    stack.post("k-1", m="return-503")
    stack.post("k-2", m="return-503")
    seen = [(run.key, run.attempt) for run in stack.payments.runs]
    assert seen == [("k-1", 1), ("k-1", 2), ("k-2", 1)]
    first, again, other = (run.downstream_key for run in stack.payments.runs)
    assert first == again != other
    assert first is not None
    assert first.startswith("oncekey-")
    threads = {run.thread for run in stack.payments.runs}
    assert ("test-loop" in threads) == (name == "asgi" or name.endswith("-async"))


def test_two_operations_at_once_do_not_mix(stack: Stack) -> None:
    """Each of many requests at the same time sees its own key."""
    keys = [f"k-{number}" for number in range(20)]
    answers = [stack.start(key) for key in keys]
    assert {answer.result(SECONDS).status_code for answer in answers} == {201}
    assert sorted(run.key for run in stack.payments.runs) == sorted(keys)


@pytest.mark.parametrize("m", ["ok", "raise", "stream", "stream-large", "refused", "not-executed"])
def test_the_operation_does_not_leak_into_the_next_request(stack: Stack, m: str) -> None:
    """After a protected request, the next one in the same task or thread sees no operation, however the first ended."""
    after = stack.together([request(m=m), request(None, method="GET", path="/status")])[1]
    assert after.content == b'{"operation":null}'
    assert stack.runs == 1


# ---------------------------------------------------------------- routes


def test_an_exempt_route_passes_and_others_follow_their_pattern(name: str, make: MakeStack) -> None:
    """``None`` exempts; a pattern with {id} gives each of its paths the route's policy, and names it in the record."""
    stack = make(
        name,
        routes={
            "POST /login": None,
            "POST /payments/{id}/refunds": Policy(effects="repeatable", key_per="endpoint", required=False),
        },
    )
    for key in (None, "k-1", "k-1"):
        login = stack.post(key, path="/login")
        assert login.content == b'{"operation":null}'
        assert "idempotency-key" not in login.headers
    stack.post(m="raise")
    assert state_of(stack) == "unknown"
    stack.post(m="raise", path="/payments/7/refunds")
    refund = stack.record("k-1", f"{ONE}\x1fPOST /payments/{{id}}/refunds")
    assert refund is not None
    assert (refund.state.value, refund.operation) == ("failed_retryable", "POST /payments/{id}/refunds")
    assert stack.post(m="raise", path="/payments/8/refunds").status_code == 422


# ---------------------------------------------------------------- the store fails


def test_with_the_store_down_nothing_runs(stack: Stack) -> None:
    """A store that does not answer is a 503, and the handler is not called; when it is back, the key is free."""
    stack.store.down = {"reserve"}
    refused = stack.post()
    assert (refused.status_code, problem(refused)) == (503, "store-unavailable")
    assert refused.headers["retry-after"]
    assert stack.runs == 0
    stack.store.down = set()
    assert stack.post().status_code == 201


@pytest.mark.parametrize("m", ["ok", "return-410", "stream"])
def test_an_answer_that_cannot_be_stored_is_not_sent(stack: Stack, m: str) -> None:
    """Finish fails: the client gets 503, and what the handler said once the keeper has stored it."""
    stack.store.down = {"swap"}
    refused = stack.post(m=m)
    assert (refused.status_code, problem(refused)) == (503, "not-stored")
    assert (stack.runs, state_of(stack)) == (1, "in_progress")
    stack.store.down = set()
    stack.once.engine.keeper._wake.set()  # it looks every second: now
    until(lambda: state_of(stack) in ("completed", "failed"), "the keeper stores it")
    again = stack.post(m=m)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.status_code == (410 if m == "return-410" else 201)
    assert stack.runs == 1


def test_who_lost_the_lease_writes_nothing(stack: Stack) -> None:
    """An owner that was robbed of its key gets what a retry would get now, and the row stays the new owner's."""
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    stack.store.steal()
    stack.payments.go.set()
    told = first.result(SECONDS)
    assert (told.status_code, problem(told)) == (409, "in-flight")
    record = stack.record()
    assert record is not None
    assert (record.owner, record.state.value, record.response) == ("somebody else", "in_progress", None)
    assert len(stack.saw(events.LeaseLost)) == 1
