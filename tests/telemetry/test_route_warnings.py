"""Warnings about operations: once per route, a bounded number of names, and no path of a client as a name."""

from __future__ import annotations

from collections.abc import Sequence

from oncekey.telemetry.bounds import REMEMBERED
from oncekey.telemetry.route_warnings import MORE_FOLLOW, NAMED, PAUSE_SECONDS, UNNAMED, Due, Warnings

ROUTES = ["POST /und/{token}", "POST /pay"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_warning_is_due_once_per_route_and_names_the_route() -> None:
    warnings = Warnings()
    warnings.know(lambda: ROUTES)
    due = [warnings.once(f"POST /und/{number}@example.org", "text") for number in range(40)]
    assert due == [Due("POST /und/{token}"), *[None] * 39]
    assert warnings.once("POST /und/1@example.org", "another text") == Due("POST /und/{token}")
    assert warnings.once("charge", "text") == Due("charge")


def test_paths_without_a_route_share_one_warning_that_says_so() -> None:
    warnings = Warnings()
    warnings.know(lambda: ROUTES)
    due = [warnings.once(f"POST /{number}", "text") for number in range(3)]
    assert due == [Due(UNNAMED), None, None]
    assert (Due(UNNAMED).end, Due("POST /pay").end) == (MORE_FOLLOW, "")


def test_names_have_a_limit_if_the_routes_are_not_known() -> None:
    warnings = Warnings()
    due = [warnings.once(f"POST /{number}", "text") for number in range(3 * REMEMBERED)]
    named = [each.operation for each in due if each is not None]
    assert named == [*(f"POST /{number}" for number in range(NAMED)), UNNAMED]
    assert len(warnings._said) == NAMED + 1


def test_app_whose_routes_cannot_be_read_is_warned_by_path() -> None:
    def broken() -> Sequence[str]:
        raise RuntimeError("a router of its own")

    warnings = Warnings()
    warnings.know(broken)
    assert warnings.once("POST /pay", "text") == Due("POST /pay")


def test_paced_warning_is_due_again_after_a_minute_with_its_count() -> None:
    clock = Clock()
    warnings = Warnings(clock)
    assert [warnings.paced("POST /pay", "text") for _ in range(5)] == [Due("POST /pay"), *[None] * 4]
    assert warnings.paced("POST /pay", "another reason") == Due("POST /pay")
    clock.now = PAUSE_SECONDS - 1
    assert warnings.paced("POST /pay", "text") is None
    clock.now = PAUSE_SECONDS
    assert warnings.paced("POST /pay", "text") == Due("POST /pay", 6)
    assert warnings.paced("POST /pay", "text") is None


def test_paced_warnings_have_a_limit() -> None:
    warnings = Warnings()
    for number in range(3 * NAMED):
        warnings.paced(f"POST /{number}", "text")
    assert len(warnings._paced) == NAMED + 1


def test_endpoint_with_parameters_of_a_path_is_not_pasteable() -> None:
    warnings = Warnings()
    warnings.know(lambda: ROUTES)
    assert warnings.pasteable("acme\x1fPOST /pay") == ("acme", "POST /pay")
    assert warnings.pasteable("acme\x1fPOST /und/ann@example.org") == ("acme", None)
    assert warnings.pasteable("acme") == ("acme", None)
