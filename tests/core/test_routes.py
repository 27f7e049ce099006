"""Which policy a request falls under, and how its operation is named."""

from __future__ import annotations

import pytest

from oncekey.core.by_operation import ByOperation
from oncekey.core.policy import Policy
from oncekey.core.routes import MAX_NAME_LENGTH, REMEMBERED, Routes
from oncekey.errors import ConfigurationError

OWN = Policy(effects="repeatable")


def operation(path: str) -> str:
    route = Routes(Policy()).match("POST", path)
    assert route is not None
    return route.operation


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("POST /payments", "/payments"),
        ("POST /payments/{id}/refund", "/payments/7/refund"),
        ("POST /payments/{id:int}/refund", "/payments/7/refund"),
        ("POST /files/{name:path}", "/files/a/b/c"),
        ("POST /files/{name:path}", "/files/"),
    ],
)
def test_a_pattern_finds_its_paths(pattern: str, path: str) -> None:
    """Converters of the frameworks are understood: a policy that silently does not apply protects nothing."""
    route = Routes(Policy(), {pattern: OWN}).match("POST", path)
    assert route is not None
    assert (route.operation, route.policy) == (pattern, OWN)


@pytest.mark.parametrize("path", ["/files/\nx", "/files/a\nx", "/files/a/\n/b\n", "/files/\n\n", "/files/\r\u2028x"])
@pytest.mark.parametrize("pattern", ["PUT /files/{name:path}", "PUT /{any:path}", "PUT /files{rest:path}"])
def test_path_with_line_breaks_falls_under_a_protected_path_pattern(pattern: str, path: str) -> None:
    """Flask and Litestar route ``PUT /files/%0Ax`` to ``/files/{name:path}``: without a key it must not get there."""
    assert Routes(Policy(), {pattern: OWN}).match("PUT", path) is not None


@pytest.mark.parametrize("path", ["/open/\nx", "/open/a\nx", "/open/a\n"])
def test_path_with_line_breaks_is_not_exempt_by_a_path_pattern(path: str) -> None:
    assert Routes(Policy(), {"POST /open/{name:path}": None}).match("POST", path) is not None


@pytest.mark.parametrize("path", ["/one/\n", "/one/\nx", "/one/x\n", "/one/\n\n", "/one/a\nb"])
@pytest.mark.parametrize("pattern", ["PUT /one/{name}", "PUT /one/{name:str}", "PUT /{first}/{second}"])
def test_segment_with_line_breaks_falls_under_a_segment_pattern(pattern: str, path: str) -> None:
    """Starlette routes each of them to ``/one/{name}``."""
    assert Routes(Policy(), {pattern: OWN}).match("PUT", path) is not None


def test_one_segment_is_one_segment() -> None:
    """Only ``:path`` spans slashes: another route must not slip under an exemption."""
    assert Routes(Policy(), {"POST /open/{id}": None}).match("POST", "/open/1") is None
    assert Routes(Policy(), {"POST /open/{id}": None}).match("POST", "/open/1/charge") is not None


@pytest.mark.parametrize("path", ["/stock", "/stock/", "/stock\n", "/stock/\n", "//stock", "///stock/", "stock"])
def test_path_variants_that_a_framework_accepts_are_protected(path: str) -> None:
    """Flask's ``strict_slashes=False``, Werkzeug's way with slashes in front, Starlette's ``$`` before a line break."""
    for written in ("PUT /stock", "PUT /stock/", "PUT /{what}"):
        assert Routes(Policy(), {written: OWN}).match("PUT", path) is not None, written


@pytest.mark.parametrize("path", ["/open/", "/open\n"])
def test_an_exemption_is_exempt_as_it_is_written(path: str) -> None:
    """And no more: what stands at another path may be another thing."""
    assert Routes(Policy(), {"POST /open": None}).match("POST", path) is not None
    assert Routes(Policy(), {"POST /open": OWN, "POST /{rest:path}": None}).match("POST", path) is not None
    assert Routes(Policy(), {"POST /{id}": OWN, "POST /open": None}).match("POST", "/open") is None
    assert Routes(Policy(), {"POST /open": OWN, "POST /{rest:path}": None}).match("POST", "/other") is None
    assert Routes(Policy(), {"POST /files/{name:path}": None}).match("POST", "/files/") is not None


@pytest.mark.parametrize("pattern", ["payments", "POST payments", "POST /a/{id", "POST /a/{}", "POST /a/{i d}"])
def test_malformed_route_pattern_is_refused(pattern: str) -> None:
    """A typing error in a route is said at the start, not found out by a double charge."""
    with pytest.raises(ConfigurationError, match="routes"):
        Routes(Policy(), {pattern: None})


@pytest.mark.parametrize("path", ["/a\0b", "/a\nb", "/\udce9", "/" + "x" * 5000])
def test_a_clients_path_becomes_a_name_that_any_store_can_keep(path: str) -> None:
    """NUL, line breaks, lone surrogates and kilobytes come from clients; the name is short and plain text."""
    name = operation(path)
    assert name.isprintable()
    assert name.isascii()
    assert len(name) <= MAX_NAME_LENGTH + 80


def test_two_long_paths_never_share_a_name() -> None:
    """With ``key_per="endpoint"`` the name is part of the scope: two endpoints must stay two."""
    assert operation("/" + "x" * 5000) != operation("/" + "x" * 5001)


def test_listed_route_is_distinct_from_the_policy_of_the_app() -> None:
    """A listed route is told from the app's policy, also where both let a request pass."""
    routes = Routes(Policy(), {"post /login": None, "PUT /files/{id}": OWN})
    assert routes.listed == {"POST /login": None, "PUT /files/{id}": OWN}
    asked = [("POST", "/login"), ("PUT", "/files/7"), ("POST", "/payments"), ("GET", "/login"), ("POST", "/files/7")]
    assert [routes.listed_as(*each) for each in asked] == ["POST /login", "PUT /files/{id}", None, None, None]
    assert routes.match("POST", "/login") is None


def test_remembered_or_not_the_answer_is_the_same() -> None:
    routes = Routes(Policy(), {"POST /login": None})
    for number in range(REMEMBERED + 100):
        first, again = routes.match("POST", f"/{number}"), routes.match("POST", f"/{number}")
        assert first is not None
        assert (first.operation, again) == (f"POST /{number}", first)
        assert routes.match("POST", "/login") is None


def test_remembered_routes_are_bounded() -> None:
    """So many are remembered, and none that is long."""
    routes = Routes(Policy())
    for method, path in (("POST", "/" + "x" * MAX_NAME_LENGTH), ("X" * MAX_NAME_LENGTH, "/")):
        routes.match(method, path)
        assert routes._remembered == {}
    for number in range(REMEMBERED + 100):
        routes.match("POST", f"/{number}")
    assert len(routes._remembered) == REMEMBERED


def test_function_of_an_operation_is_found_for_a_route_a_function_and_a_queue() -> None:
    functions: ByOperation[str] = ByOperation("resolver")
    for operation in ("POST /payments/{id}", "charge", "message payments/billing"):
        functions.add(operation, operation)
    assert functions.of("POST /payments/7") == "POST /payments/{id}"
    assert [functions.of(each) for each in ("charge", "message payments/billing")] == [
        "charge",
        "message payments/billing",
    ]
    with pytest.raises(ConfigurationError, match="nor 'message QUEUE'"):
        functions.add("msg payments", "")
