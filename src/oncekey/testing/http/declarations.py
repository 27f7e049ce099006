"""What handlers declare, the list of routes, and endpoints that the app adds after ``protect()``."""

from __future__ import annotations

import pytest

from oncekey.testing.http.base import MakeStack, SuiteBase
from oncekey.testing.http.checks import replays, state_of
from oncekey.testing.http.protected import Framework
from oncekey.testing.http.stack import Stack
from oncekey.web.route_audit import Coverage


class DeclarationSuite(SuiteBase):
    """Needs ``Framework.make_declaring_app``; without it, these tests are skipped."""

    @pytest.fixture
    def declaring(self, under_test: Framework, make_stack: MakeStack) -> Stack:
        if under_test.make_declaring_app is None:
            pytest.skip("this framework has no make_declaring_app")
        return make_stack(declaring=True)

    def test_declared_policy_holds_for_its_handler(self, declaring: Stack) -> None:
        """The app's policy says "external", by which a handler that raises makes its key unknown."""
        declaring.post("k-declared", "raise", path="/declared/7")
        assert state_of(declaring, "k-declared") == "failed_retryable"

    def test_operation_has_the_pattern_of_the_route(self, declaring: Stack) -> None:
        declaring.post("k-declared", path="/declared/7")
        record = declaring.record("k-declared")
        assert record is not None
        assert record.operation == "POST /declared/{id}"

    def test_exempt_handler_runs_each_time_without_an_operation(self, declaring: Stack) -> None:
        for _ in range(2):
            assert declaring.post("k-exempt", path="/exempt").content == b'{"operation":null}'
        assert declaring.record("k-exempt") is None

    def test_declaration_that_is_found_is_not_reported_as_without_effect(self, declaring: Stack) -> None:
        declaring.post("k-exempt", path="/exempt")
        assert [line for line in declaring.inside.warnings if "has no effect" in line] == []

    def test_late_endpoint_runs_once(self, declaring: Stack) -> None:
        first = declaring.post("k-late", path="/late")
        assert replays(first, declaring.post("k-late", path="/late"))
        assert declaring.runs == 1

    def test_late_endpoint_is_wrapped(self, declaring: Stack) -> None:
        """Without its report, the 429 would count as an answer of middleware, and the key would be unknown."""
        assert declaring.post("k-late", "refused-429", path="/late").status_code == 429
        assert state_of(declaring, "k-late") == "failed_retryable"

    def test_list_of_routes_says_what_protects_each(self, declaring: Stack) -> None:
        found = declaring.inside.coverage()
        assert found["POST", "/declared/{id}"] is Coverage.PROTECTED
        assert found["POST", "/late"] is Coverage.PROTECTED
        assert found["POST", "/exempt"] is Coverage.EXEMPT
