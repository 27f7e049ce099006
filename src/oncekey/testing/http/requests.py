"""The tenant of a key, requests that need one, and the operation that a handler sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from oncekey import NotAuthenticated, Policy
from oncekey.engine.request import Request
from oncekey.testing.http.base import MakeStack, SuiteBase
from oncekey.testing.http.checks import lines, problem, replays, state_of
from oncekey.testing.http.flaky import ONE
from oncekey.testing.http.protected import Framework
from oncekey.testing.http.stack import SECONDS, Stack, request

# ---------------------------------------------------------------- whose key


def by_user(asked: Any) -> str:
    tenant: str = asked.headers.get("x-user", "")
    if not tenant:
        raise NotAuthenticated("send your credentials")
    return tenant


async def by_user_async(asked: Any) -> str:
    return by_user(asked)


@dataclass(frozen=True)
class ByHeader:
    """A scope function that asks for one header."""

    name: str

    def __call__(self, asked: Any) -> str:
        assert (self.name in asked.headers) == (self.name.upper() in asked.headers)
        if isinstance(asked, Request):  # a framework may pass its own request
            assert all(each == each.lower() for each in asked.headers)
        tenant: str = asked.headers.get(self.name, "everybody")
        return tenant


class RequestSuite(SuiteBase):
    """The tenant of a key, requests that need one, and the operation that a handler sees."""

    def test_two_tenants_with_one_key_do_not_meet(self, make_stack: MakeStack) -> None:
        """The same key of two tenants is two keys, with two effects and two answers."""
        stack = make_stack(scope=by_user)
        ann: dict[str, Any] = {"headers": {"x-user": "ann"}}
        bob: dict[str, Any] = {"headers": {"x-user": "bob"}, "body": {"amount": 5}}
        of_ann, of_bob = stack.post(**ann), stack.post(**bob)
        assert (of_ann.status_code, of_bob.status_code, stack.runs) == (201, 201, 2)
        assert of_ann.content != of_bob.content
        assert replays(of_ann, stack.post(**ann))
        assert replays(of_bob, stack.post(**bob))
        assert stack.record("k-1", "ann") != stack.record("k-1", "bob")

    @pytest.mark.parametrize("header", ["X-Tenant", "x-tenant", "X-TENANT"])
    def test_tenant_is_found_by_a_header_name_in_any_case(self, make_stack: MakeStack, header: str) -> None:
        """Two tenants with one key and one body stay two: neither reads the answer of the other."""
        stack = make_stack(scope=ByHeader(header))
        ann, bob = (stack.post(headers={"x-tenant": tenant}) for tenant in ("ann", "bob"))
        assert (ann.status_code, bob.status_code, stack.runs) == (201, 201, 2)
        assert ann.content != bob.content
        assert stack.record("k-1", "everybody") is None

    def test_unauthenticated_request_gets_401_before_any_look_up(self, make_stack: MakeStack) -> None:
        """An unauthenticated caller gets 401, also for a key that has an answer, and the store is not asked."""
        stack = make_stack(scope=by_user)
        stack.post(headers={"x-user": "ann"})
        stack.store.down = {"reserve", "read", "swap"}
        refused = stack.post()
        assert (refused.status_code, problem(refused)) == (401, "not-authenticated")
        assert refused.headers["www-authenticate"]
        assert stack.runs == 1

    def test_the_scope_function_may_be_async(self, under_test: Framework, make_stack: MakeStack) -> None:
        """In an ASGI app the tenant may be looked up asynchronously."""
        if not under_test.is_async:
            pytest.skip("a WSGI app has no event loop for it")
        stack = make_stack(scope=by_user_async)
        assert replays(stack.post(headers={"x-user": "ann"}), stack.post(headers={"x-user": "ann"}))
        assert stack.record("k-1", "ann") is not None

    # ---------------------------------------------------------------- which requests need a key

    def test_no_key_is_400(self, stack: Stack) -> None:
        """A state-changing request without a key is refused, says what to send, and leaves no trace."""
        answer = stack.post(None)
        assert (answer.status_code, problem(answer)) == (400, "key-missing")
        assert 'rel="describedby"' in answer.headers["link"]
        assert (stack.runs, stack.rows()) == (0, [])

    @pytest.mark.parametrize(
        "key",
        ["", " ", "two words", '"unterminated', "k" * 256, ["k-1", "k-2"], ["k-1", "k-1"]],
        ids=["empty", "blank", "space", "unterminated", "long", "two", "twice-the-same"],
    )
    def test_a_malformed_key_is_400(self, stack: Stack, key: Any) -> None:
        """A key that is none is refused before the store is asked, and the handler does not run."""
        answer = stack.post(key)
        assert (answer.status_code, problem(answer)) == (400, "key-malformed")
        assert (stack.runs, stack.rows()) == (0, [])

    def test_the_quoted_and_the_bare_key_are_the_same(self, stack: Stack) -> None:
        """Each answer repeats the key as the client spelt it, and both name one operation."""
        bare, quoted = stack.post("k-1"), stack.post('"k-1"')
        assert quoted.headers["idempotency-key"] == '"k-1"'
        assert (bare.content, stack.runs) == (quoted.content, 1)

    def test_get_passes_untouched(self, stack: Stack) -> None:
        """A GET runs every time, with a key and without, and neither carries our headers nor leaves a row."""
        for key in (None, "k-1", "k-1"):
            answer = stack.post(key, method="GET", path="/status")
            assert (answer.status_code, answer.content) == (200, b'{"operation":null}')
            assert not any(line[0].startswith("idempotency") for line in lines(answer))
        assert stack.rows() == []

    def test_a_body_over_the_cap_is_413(self, make_stack: MakeStack) -> None:
        """A body that is too large to hash is refused, never let past, and leaves the key unused."""
        stack = make_stack(policy=Policy(max_request_bytes=100))
        refused = stack.post(content=b"x" * 101)
        assert (refused.status_code, problem(refused)) == (413, "body-too-large")
        assert (stack.runs, state_of(stack)) == (0, None)
        assert stack.post(content=b"x" * 100).status_code == 201

    # ---------------------------------------------------------------- what never reached a handler

    @pytest.mark.parametrize(
        ("asked", "status"), [({"path": "/nowhere"}, 404), ({"method": "PATCH"}, 405)], ids=["404", "405"]
    )
    def test_a_request_without_a_handler(self, stack: Stack, asked: dict[str, Any], status: int) -> None:
        """A refusal of the framework leaves the key unused. A 4xx of a raw app is its response, stored and replayed."""
        first = stack.post(**asked)
        assert first.status_code == status
        assert stack.runs == 0
        if stack.framework.reports_endpoints:
            assert state_of(stack) is None
            assert stack.post().status_code == 201
        else:
            # An app without a framework answers 404 itself, and its answer is stored like any other.
            assert state_of(stack) == "failed"
            assert replays(first, stack.post(**asked))

    # ---------------------------------------------------------------- what a handler sees of itself

    def test_the_handler_sees_its_operation(self, make_stack: MakeStack) -> None:
        """``current()`` has key and attempt in async handlers and in sync ones, which run in another thread."""
        stack = make_stack(effects="repeatable")
        stack.post('"k-1"', m="return-503")
        stack.post("k-1", m="return-503")
        stack.post("k-2", m="return-503")
        seen = [(run.key, run.attempt) for run in stack.payments.runs]
        assert seen == [("k-1", 1), ("k-1", 2), ("k-2", 1)]
        first, again, other = (run.downstream_key for run in stack.payments.runs)
        assert first == again != other
        assert first is not None
        assert first.startswith("oncekey-")
        assert {run.in_loop for run in stack.payments.runs} == {stack.framework.async_handlers}

    def test_two_operations_at_once_do_not_mix(self, stack: Stack) -> None:
        """Each of many requests at the same time sees its own key."""
        keys = [f"k-{number}" for number in range(20)]
        answers = [stack.start(key) for key in keys]
        assert {answer.result(SECONDS).status_code for answer in answers} == {201}
        assert sorted(run.key for run in stack.payments.runs) == sorted(keys)

    @pytest.mark.parametrize("m", ["ok", "raise", "stream", "stream-large", "refused", "not-executed"])
    def test_the_operation_does_not_leak_into_the_next_request(self, stack: Stack, m: str) -> None:
        """The next request in the same task or thread sees no operation, however the protected one ended."""
        after = stack.together([request(m=m), request(None, method="GET", path="/status")])[1]
        assert after.content == b'{"operation":null}'
        assert stack.runs == 1

    # ---------------------------------------------------------------- routes

    def test_an_exempt_route_passes_and_others_follow_their_pattern(self, make_stack: MakeStack) -> None:
        """``None`` exempts. A pattern with {id} gives its paths the route's policy, and the record has its name."""
        stack = make_stack(
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
