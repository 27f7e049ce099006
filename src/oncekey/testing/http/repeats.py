"""The same request again, in turn and at once; another one under its key; and a store that fails."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from email.utils import formatdate
from typing import Any

import pytest

from oncekey import Policy
from oncekey.telemetry import events
from oncekey.testing.http.base import MakeStack, SuiteBase
from oncekey.testing.http.checks import OURS, lines, problem, replays, state_of, stored_lines
from oncekey.testing.http.stack import PAYMENT, SECONDS, Stack, until


class RepeatSuite(SuiteBase):
    """The same request again, in turn and at once; another one under its key; and a store that fails."""

    # ---------------------------------------------------------------- the same request twice

    def test_the_replay_repeats_the_first_byte_for_byte(self, stack: Stack) -> None:
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

    def test_the_replay_is_these_very_bytes(self, stack: Stack) -> None:
        """A replay has exactly these headers and this body in every framework."""
        stack.post("key-of-mine")
        again = stack.post("key-of-mine")
        record = stack.record("key-of-mine")
        assert record is not None
        assert (again.status_code, again.content) == (201, b'{"id":"pay_1","status":"paid"}')
        assert lines(again) == [
            ("cache-control", "no-store"),
            ("content-length", "30"),
            ("content-type", "application/json"),
            ("etag", '"1"'),
            ("idempotency-expires", formatdate(int(record.expires_at), usegmt=True)),
            ("idempotency-key", "key-of-mine"),
            ("idempotency-replayed", "true"),
            ("location", "/payments/pay_1"),
        ]

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
    def test_another_request_under_the_same_key_is_422(self, stack: Stack, other: dict[str, Any]) -> None:
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
    def test_the_same_json_in_another_spelling_replays(self, stack: Stack, same: bytes) -> None:
        """Key order and white space make no other request."""
        first = stack.post()
        assert replays(first, stack.post(content=same, headers={"content-type": "application/json"}))
        assert stack.runs == 1

    @pytest.mark.parametrize("in_flight", ["conflict", "wait"])  # "accepted": test_in_flight_accepted.py
    def test_another_body_is_422_also_while_the_first_is_in_flight(self, make_stack: MakeStack, in_flight: Any) -> None:
        """422 wins over 409 and over waiting: a client that misuses a key learns that at once."""
        stack = make_stack(policy=Policy(in_flight=in_flight))
        first = stack.start(m="slow")
        assert stack.payments.entered.wait(SECONDS)
        refused = stack.post(m="slow", body=PAYMENT | {"amount": 2000})
        assert (refused.status_code, problem(refused)) == (422, "mismatch")
        assert "retry-after" not in refused.headers
        stack.payments.go.set()
        assert first.result(SECONDS).status_code == 201
        assert stack.runs == 1

    # ---------------------------------------------------------------- at once

    def test_in_flight_is_409_with_retry_after_and_then_a_replay(self, make_stack: MakeStack) -> None:
        """While the first runs, a duplicate is told when to come again; then it gets the first one's answer."""
        stack = make_stack(policy=Policy(retry_after=timedelta(seconds=3)))
        first = stack.start(m="slow")
        assert stack.payments.entered.wait(SECONDS)
        busy = stack.post(m="slow")
        assert (busy.status_code, problem(busy)) == (409, "in-flight")
        assert busy.headers["retry-after"] == "3"
        assert busy.headers["idempotency-key"] == "k-1"
        stack.payments.go.set()
        assert replays(first.result(SECONDS), stack.post(m="slow"))
        assert stack.runs == 1

    def test_50_at_once_have_one_effect(self, stack: Stack) -> None:
        """Of 50 duplicates at the same moment one runs, and 49 are told to come again."""
        answers = [stack.start(m="slow") for _ in range(50)]
        until(lambda: sum(answer.done() for answer in answers) == 49, "49 answers while the first still runs")
        stack.payments.go.set()
        statuses = Counter(answer.result(SECONDS).status_code for answer in answers)
        assert statuses == {201: 1, 409: 49}
        assert stack.runs == 1

    def test_waiting_duplicates_get_the_first_ones_answer(self, make_stack: MakeStack) -> None:
        """With ``in_flight="wait"`` a duplicate is held until the first is done, and gets its bytes."""
        stack = make_stack(policy=Policy(in_flight="wait"))
        first = stack.start(m="slow")
        assert stack.payments.entered.wait(SECONDS)
        others = [stack.start(m="slow") for _ in range(5)]
        until(lambda: stack.inside.is_waiting("k-1"), "a duplicate waits")
        assert not any(other.done() for other in others)
        stack.payments.go.set()
        assert all(replays(first.result(SECONDS), other.result(SECONDS)) for other in others)
        assert stack.runs == 1

    def test_waiting_ends_with_a_409(self, make_stack: MakeStack) -> None:
        """A waiting duplicate gives up after the policy's time, and the first request is not disturbed."""
        stack = make_stack(policy=Policy(in_flight="wait", wait=timedelta(seconds=0.05)))
        first = stack.start(m="slow")
        assert stack.payments.entered.wait(SECONDS)
        late = stack.post(m="slow")
        assert (late.status_code, problem(late)) == (409, "in-flight")
        assert len(stack.saw(events.WaitedOut)) == 1
        stack.payments.go.set()
        assert first.result(SECONDS).status_code == 201
        assert stack.runs == 1

    # ---------------------------------------------------------------- the store fails

    def test_with_the_store_down_nothing_runs(self, stack: Stack) -> None:
        """A store that does not answer is a 503, and the handler is not called; when it is back, the key is free."""
        stack.store.down = {"reserve"}
        refused = stack.post()
        assert (refused.status_code, problem(refused)) == (503, "store-unavailable")
        assert refused.headers["retry-after"]
        assert stack.runs == 0
        stack.store.down = set()
        assert stack.post().status_code == 201

    @pytest.mark.parametrize("m", ["ok", "return-410", "stream"])
    def test_an_answer_that_cannot_be_stored_is_not_sent(self, stack: Stack, m: str) -> None:
        """If the response cannot be stored, the client gets 503. When the keeper has stored it, a retry gets it."""
        stack.store.down = {"swap"}
        refused = stack.post(m=m)
        assert (refused.status_code, problem(refused)) == (503, "not-stored")
        assert (stack.runs, state_of(stack)) == (1, "in_progress")
        stack.store.down = set()
        stack.inside.wake_keeper()
        until(lambda: state_of(stack) in ("completed", "failed"), "the keeper stores it")
        again = stack.post(m=m)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.status_code == (410 if m == "return-410" else 201)
        assert stack.runs == 1

    def test_owner_that_lost_its_lease_cannot_write(self, stack: Stack) -> None:
        """An owner that was robbed of its key gets what a retry would get now, and the row stays the new owner's."""
        first = stack.start(m="slow")
        assert stack.payments.entered.wait(SECONDS)
        stack.store.steal()
        stack.payments.go.set()
        answer = first.result(SECONDS)
        assert (answer.status_code, problem(answer)) == (409, "in-flight")
        record = stack.record()
        assert record is not None
        assert (record.owner, record.state.value, record.response) == ("another owner", "in_progress", None)
        assert len(stack.saw(events.LeaseLost)) == 1
