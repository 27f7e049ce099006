"""How a handler ends decides what becomes of its key, and what a retry gets."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from oncekey import Policy
from oncekey.telemetry import events
from oncekey.testing.http.base import MakeStack, SuiteBase
from oncekey.testing.http.checks import problem, replays, state_of
from oncekey.testing.http.payments import MAX_RESPONSE
from oncekey.testing.http.protected import Framework
from oncekey.testing.http.stack import Stack

EFFECTS = ("external", "transactional", "phased", "repeatable")


# ---------------------------------------------------------------- how handlers end

NO_WORD = {
    # what a 5xx, or an exception that became one, leaves behind
    "external": "unknown",
    "transactional": "failed_retryable",
    "phased": "failed_retryable",
    "repeatable": "failed_retryable",
}
MODES = {
    # How the handler ends -> the status of its response, and the state of its key. "no word": the handler did not say
    # what happened, so `effects` decides the state.
    "raise": (500, "no word"),
    "abort-500": (500, "no word"),
    "stream-broken": (500, "no word"),
    "abort-503": (503, "no word"),
    "return-500": (500, "no word"),
    "return-503": (503, "no word"),
    "return-408": (408, "no word"),
    "abort-408": (408, "no word"),
    "return-410": (410, "failed"),
    "abort-410": (410, "failed"),
    "return-401": (401, "failed"),
    "abort-403": (403, "failed"),
    "return-425": (425, "failed_retryable"),
    "return-429": (429, "failed_retryable"),
    "abort-429": (429, "failed_retryable"),
    "not-executed": (503, "failed_retryable"),
    "unknown": (409, "unknown"),
    "refused": (400, None),
    "ok": (201, "completed"),
    "stream": (201, "completed"),
    "204": (204, "completed"),
}


class EndingSuite(SuiteBase):
    """How a handler ends decides what becomes of its key, and what a retry gets."""

    @pytest.fixture(autouse=True)
    def _without_http_exceptions(self, request: pytest.FixtureRequest, under_test: Framework) -> None:
        callspec = getattr(request.node, "callspec", None)
        if callspec and str(callspec.params.get("m", "")).startswith("abort") and not under_test.reports_endpoints:
            pytest.skip("without a framework there is no HTTP exception to raise")

    @pytest.mark.parametrize(
        ("m", "effects"),
        [
            (m, effects)
            for m in MODES
            for effects in EFFECTS
            # A success is completed with any `effects`, so one of them is enough.
            if effects == "external" or MODES[m][1] != "completed"
        ],
    )
    def test_ending_of_a_handler_gives_its_key_a_state(self, make_stack: MakeStack, m: str, effects: str) -> None:
        """How a handler ended decides the state of its key, and the state decides what the retry gets."""
        status, state = MODES[m]
        if state == "no word":
            state = NO_WORD[effects]
        stack = make_stack(effects=effects)
        first = stack.post(m=m)
        assert first.status_code == status
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

    @pytest.mark.parametrize("m", [m for m in MODES if m not in ("ok", "refused", "204", "stream", "stream-broken")])
    def test_answer_of_a_released_key_is_stored_when_it_succeeds(self, make_stack: MakeStack, m: str) -> None:
        """A retry of a failure that left nothing behind runs as attempt 2, under the same downstream key, and stays."""
        stack = make_stack(effects="repeatable")
        stack.post(m=m)
        released = state_of(stack) == "failed_retryable"
        assert released == (MODES[m][1] in ("no word", "failed_retryable"))
        stack.payments.healed = True
        second, third = stack.post(m=m), stack.post(m=m)
        if released:
            assert second.status_code == 201
            assert replays(second, third)
            assert [run.attempt for run in stack.payments.runs] == [1, 2]
            assert len({run.downstream_key for run in stack.payments.runs}) == 1
        else:
            assert stack.runs == 1

    @pytest.mark.parametrize(("on_server_error", "state"), [
        ("replay", "failed"), ("unknown", "unknown"), ("retry", "failed_retryable"),
    ])  # fmt: skip
    def test_on_server_error_decides_a_returned_5xx(
        self, make_stack: MakeStack, on_server_error: Any, state: str
    ) -> None:
        """``on_server_error`` overrides what a returned 5xx means, whatever the effects."""
        stack = make_stack(policy=Policy(on_server_error=on_server_error))
        first = stack.post(m="return-500")
        assert (first.status_code, state_of(stack)) == (500, state)
        second = stack.post(m="return-500")
        assert replays(first, second) == (on_server_error == "replay")
        assert stack.runs == (2 if on_server_error == "retry" else 1)

    @pytest.mark.parametrize(("on_server_error", "state"), [("replay", "failed"), ("retry", "failed_retryable")])
    @pytest.mark.parametrize("m", ["raise", "abort-503"])
    def test_on_server_error_holds_for_an_http_exception_and_for_no_other(
        self, make_stack: MakeStack, on_server_error: Any, state: str, m: str
    ) -> None:
        """``raise HTTPException(503)`` is a status of the handler, so ``on_server_error`` applies. A ``RuntimeError``
        has none: an external handler may have charged before it."""
        stack = make_stack(policy=Policy(on_server_error=on_server_error))
        stack.post(m=m)
        assert state_of(stack) == (state if m == "abort-503" else "unknown")
        stack.post(m=m)
        assert stack.runs == (2 if state_of(stack) == "failed_retryable" else 1)

    def test_a_refused_request_leaves_its_key_for_another_one(self, stack: Stack) -> None:
        """Refused before the operation began: the corrected request may come with the same key."""
        refused = stack.post(m="refused")
        assert (refused.status_code, problem(refused)) == (400, "refused")
        assert "not today" in refused.json()["detail"]
        assert stack.post(body={"amount": 2}).status_code == 201

    def test_a_refused_retry_gives_the_key_back_as_it_was(self, make_stack: MakeStack) -> None:
        """A later attempt has a history: it is released, not forgotten, and its fingerprint stays."""
        stack = make_stack(effects="repeatable")
        stack.payments.raising = True
        stack.post(m="refused")
        assert state_of(stack) == "failed_retryable"
        stack.payments.raising = False
        assert stack.post(m="refused").status_code == 400
        assert state_of(stack) == "failed_retryable"
        assert problem(stack.post(m="refused", body={"amount": 2})) == "mismatch"

    def test_refused_after_the_operation_began_does_not_free_the_key(self, stack: Stack) -> None:
        """A handler that used a verb has begun: Refused comes too late then, and the key stays taken."""
        first, second = stack.post(m="refused-410"), stack.post(m="refused-410")
        assert (first.status_code, problem(first), state_of(stack)) == (410, "refused-late", "failed")
        assert replays(first, second)
        assert stack.runs == 1

    def test_refused_too_late_with_a_retryable_status_is_not_final(self, stack: Stack) -> None:
        """A 429 means "not processed", also where Refused comes too late: the key can be used again."""
        assert stack.post(m="refused-429").status_code == 429
        assert state_of(stack) == "failed_retryable"

    # ---------------------------------------------------------------- what cannot be stored

    @pytest.mark.parametrize("m", ["large", "stream-large"])
    def test_too_large_an_answer_leaves_a_tombstone(self, stack: Stack, m: str) -> None:
        """The first answer arrives whole. The retry gets status, stored headers and a note, and does not run."""
        first, second = stack.post(m=m), stack.post(m=m)
        assert first.status_code == second.status_code == 201
        assert len(first.content) > MAX_RESPONSE
        expires = [parsedate_to_datetime(each.headers["idempotency-expires"]) for each in (first, second)]
        assert expires[0] <= expires[1]  # the headers of a stream are sent before its key is completed
        assert expires[0] == expires[1] or m == "stream-large"
        assert second.json()["type"] == "urn:oncekey:problem:body-not-kept"
        assert second.headers["location"] == first.headers["location"] == "/payments/pay_1"
        assert second.headers["content-type"] == "application/json"
        assert second.headers["idempotency-replayed"] == "true"
        assert (stack.runs, state_of(stack)) == (1, "completed")
        assert len(stack.saw(events.Tombstoned)) == 1

    def test_an_event_stream_leaves_a_tombstone(self, stack: Stack) -> None:
        """Events are passed on as they come, so they are not kept, and the retry learns that it is done."""
        first, second = stack.post(m="events"), stack.post(m="events")
        assert first.content == b"data: 1\n\ndata: 2\n\n"
        assert second.json()["type"] == "urn:oncekey:problem:body-not-kept"
        assert (stack.runs, state_of(stack)) == (1, "completed")

    def test_a_small_stream_is_stored_whole(self, stack: Stack) -> None:
        """What was streamed in pieces and fits is replayed byte for byte, with its length."""
        first, second = stack.post(m="stream"), stack.post(m="stream")
        assert first.content == b'{"id":"pay_1"}'
        assert first.headers["content-length"] == "14"
        assert replays(first, second)
        assert stack.runs == 1

    def test_a_204_replays_without_a_body(self, stack: Stack) -> None:
        """An answer without a body is stored and replayed without one, and without a length."""
        first, second = stack.post(m="204"), stack.post(m="204")
        assert (first.status_code, second.status_code, second.content) == (204, 204, b"")
        assert "content-length" not in first.headers
        assert replays(first, second)
        assert stack.runs == 1
