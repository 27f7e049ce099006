"""The setting ONCEKEY: what is wrong with it, the system check names, and says what to write."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.web.django_apps import configure, urls

configure()

from django.core.checks import run_checks  # noqa: E402 - Django is configured first
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.db import connections, transaction  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import include, path, re_path  # noqa: E402
from django.views import View  # noqa: E402

from oncekey import SINGLE_TENANT, OnceKey, Policy  # noqa: E402
from oncekey.errors import ConfigurationError  # noqa: E402
from oncekey.web.django import conf  # noqa: E402

GOOD = {"STORE": "memory://", "SCOPE": "SINGLE_TENANT"}
OURS = "oncekey.web.django.OnceKeyMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


def tenant_of(request: Any) -> str:
    return "ann"


def pay(request: HttpRequest, pk: int = 0) -> HttpResponse:
    return HttpResponse()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    conf.once.reset()
    yield
    conf.once.reset()


@pytest.fixture
def file_alias(tmp_path: Path) -> Iterator[str]:
    connections.settings["filed"] = {**connections.settings["default"], "NAME": tmp_path / "shop ?.sqlite3"}
    yield "filed"
    del connections["filed"]
    del connections.settings["filed"]


def checked(said: Any, middleware: Any = (OURS,), *patterns: Any) -> list[tuple[str, str, str]]:
    """Id, message and hint of what the checks say. ``patterns``: the routes of the project."""
    with override_settings(ONCEKEY=said, MIDDLEWARE=list(middleware), ROOT_URLCONF=urls(*patterns)):
        return [(each.id or "", each.msg, each.hint or "") for each in run_checks(tags=["oncekey"])]


def test_good_settings_say_nothing() -> None:
    assert checked(GOOD) == []
    assert checked({**GOOD, "SCOPE": "tests.web.test_django_settings.tenant_of", "POLICY": {"effects": "phased"}}) == []
    routes = {"POST /pay": {"effects": "repeatable"}}
    assert checked({**GOOD, "SCOPE": SINGLE_TENANT, "ROUTES": routes}, [OURS], path("pay", pay)) == []


WRONG: list[tuple[Any, str, str, str]] = [
    (None, "E001", "ONCEKEY is missing", '"STORE": "default"'),
    (["memory://"], "E001", "is a list", "ONCEKEY = {"),
    ({**GOOD, "SCOP": "x"}, "E002", "no setting 'SCOP'", "Did you mean 'SCOPE'?"),
    ({**GOOD, "store": "x"}, "E002", "no setting 'store'", "Did you mean 'STORE'?"),
    ({"SCOPE": "SINGLE_TENANT"}, "E003", "ONCEKEY['STORE'] is missing", "an alias of DATABASES ('default')"),
    ({**GOOD, "STORE": "defualt"}, "E003", "'defualt', which is neither", "'default'"),
    ({**GOOD, "STORE": "oracle://me:secret@db"}, "E003", "'oracle://…'", "postgresql://"),
    ({**GOOD, "STORE": "default"}, "E004", "in memory", '["TEST"]'),
    ({"STORE": "memory://"}, "E005", "ONCEKEY['SCOPE'] is missing", "SINGLE_TENANT"),
    ({**GOOD, "SCOPE": "shop.nowhere"}, "E005", "ONCEKEY['SCOPE'] is 'shop.nowhere'", "dotted path"),
    ({**GOOD, "AUTHORIZE": 5}, "E005", "ONCEKEY['AUTHORIZE'] is 5", "dotted path"),
    ({**GOOD, "POLICY": "transactional"}, "E006", "ONCEKEY['POLICY'] is 'transactional'", '{"effects"'),
    ({**GOOD, "POLICY": {"effect": "x"}}, "E006", "ONCEKEY['POLICY'] is wrong", "options of a Policy"),
    ({**GOOD, "ROUTES": {"POST /pay": {"ttl": 5}}}, "E006", "ONCEKEY['ROUTES']['POST /pay']", "Policy"),
    ({**GOOD, "ROUTES": ["POST /pay"]}, "E006", "ONCEKEY['ROUTES'] is not a dict", '"POST /payments"'),
    ({**GOOD, "ROUTES": {"/pay": None}}, "E007", "ONCEKEY['ROUTES'] cannot be used", "'/pay' is not of the form"),
    ({**GOOD, "PROFILE": "strype"}, "E007", "ONCEKEY['PROFILE'] is 'strype'", "It takes 'ietf', 'stripe' or"),
    ({**GOOD, "GRACE": "5s"}, "E007", "ONCEKEY['GRACE'] is '5s'", "It takes a number of seconds, 0 or more"),
    ({**GOOD, "GRACE": -1}, "E007", "ONCEKEY['GRACE'] is -1", "0 or more"),
    ({**GOOD, "GRACE": float("nan")}, "E007", "ONCEKEY['GRACE'] is nan", "0 or more"),
    ({**GOOD, "MAX_QUEUED": "x"}, "E007", "ONCEKEY['MAX_QUEUED'] is 'x'", "It takes a whole number, 1 or more"),
    ({**GOOD, "MAX_QUEUED": 0}, "E007", "ONCEKEY['MAX_QUEUED'] is 0", "1 or more"),
    ({**GOOD, "MAX_QUEUED": True}, "E007", "ONCEKEY['MAX_QUEUED'] is True", "a whole number"),
    ({**GOOD, "MAX_ACTIVE_KEYS": "x"}, "E007", "ONCEKEY['MAX_ACTIVE_KEYS'] is 'x'", "It takes a whole number"),
    ({**GOOD, "DOCS_URL": 5}, "E007", "ONCEKEY['DOCS_URL'] is 5", "It takes the address of a page"),
    ({**GOOD, "STATUS_URL": 5}, "E007", "ONCEKEY['STATUS_URL'] is 5", "such as '/idempotency'"),
    ({**GOOD, "STATUS_URL": "idempotency"}, "E007", "ONCEKEY['STATUS_URL'] is 'idempotency'", "'/idempotency'"),
    ({**GOOD, "MIGRATE": "no"}, "E007", "ONCEKEY['MIGRATE'] is 'no'", "It takes True or False"),
    ({**GOOD, "CACHE": 5}, "E007", "ONCEKEY['CACHE'] cannot be used", "'redis://host'"),
    ({**GOOD, "CACHE": "redis://:secret@h"}, "E007", "ONCEKEY['CACHE'] needs ONCEKEY['CACHE_SECRET']", "django.md"),
    ({**GOOD, "CACHE_TTL": 0}, "E007", "ONCEKEY['CACHE_TTL'] is 0", "It takes a number of seconds, more than 0"),
    ({**GOOD, "CACHE_TTL": timedelta(seconds=5)}, "E007", "ONCEKEY['CACHE_TTL'] is datetime.timedelta", "seconds"),
    ({**GOOD, "CACHE_SECRET": 5}, "E007", "ONCEKEY['CACHE_SECRET'] cannot be used", "It takes a text or bytes"),
    ({**GOOD, "BIND_SECRET": 5}, "E007", "ONCEKEY['BIND_SECRET'] cannot be used", "It takes a text or bytes"),
    ({**GOOD, "BIND_SECRET": "short"}, "E007", "ONCEKEY['BIND_SECRET'] cannot be used", "bytes or more"),
    ({**GOOD, "ENCRYPTION": "x"}, "E007", "ONCEKEY['ENCRYPTION'] cannot be used", "It takes a keyring"),
    ({**GOOD, "LIMITS": 5}, "E007", "ONCEKEY['LIMITS'] cannot be used", "It takes a Limits"),
    ({**GOOD, "TELEMETRY": 5}, "E007", "ONCEKEY['TELEMETRY'] is 5", "It takes the name of an exporter"),
    ({**GOOD, "ON_EVENT": 5}, "E005", "ONCEKEY['ON_EVENT'] is 5", "dotted path"),
    ({**GOOD, "ONLY": "listed"}, "E008", "ONCEKEY['ONLY'] is 'listed'", "'declared'"),
    ({**GOOD, "UPKEEP": "yes"}, "E008", "ONCEKEY['UPKEEP'] is 'yes'", "'auto'"),
]
"""Settings; the number of the check; a part of its message; a part of its hint."""


def test_every_setting_has_a_wrong_value_below() -> None:
    said = [given for given, _, _, _ in WRONG if isinstance(given, dict)]
    tried = {name for given in said for name in {**GOOD, **given} if given.get(name) != GOOD.get(name)}
    assert tried >= {*conf._OPTIONS, *conf._OF_MIDDLEWARE}


@pytest.mark.parametrize(("said", "number", "message", "hint"), WRONG, ids=str)
def test_wrong_setting_is_named_and_says_what_to_write(said: Any, number: str, message: str, hint: str) -> None:
    ((found, text, advice),) = checked(said)
    assert found == f"oncekey.{number}"
    assert message in text
    assert hint in advice
    assert "secret@" not in text + advice
    assert "OnceKey(" not in text + advice


def test_first_use_raises_what_the_check_says() -> None:
    with override_settings(ONCEKEY={"STORE": "memory://"}), pytest.raises(ImproperlyConfigured, match="SCOPE"):
        conf.once.get()


@pytest.mark.parametrize(
    ("middleware", "number"),
    [
        ([], "W001"),
        ([OURS, OURS], "W002"),
        ([OURS, AUTHENTICATION], "E009"),
        ([AUTHENTICATION, OURS], None),
    ],
)
def test_place_of_the_middleware_is_checked(middleware: list[str], number: str | None) -> None:
    found = [name for name, _, _ in checked(GOOD, middleware)]
    assert found == ([] if number is None else [f"oncekey.{number}"])


@pytest.mark.parametrize("policy", [{"effects": "repeatable"}, None])
@pytest.mark.parametrize(
    ("listed", "meant"),
    [
        ("POST /paymens", "'POST /payments'"),
        ("POST /payment/{id}/", "'POST /payments/{pk}/'"),
        ("GET /payments", "'"),
        ("POST /v2/orders/new", "`manage.py oncekey routes`"),
    ],
)
def test_route_that_the_project_does_not_have_is_named(listed: str, meant: str, policy: Any) -> None:
    """A misspelt entry protects nothing, and exempts nothing."""
    patterns = path("payments", pay), path("payments/<int:pk>/", pay)
    ((number, message, hint),) = checked({**GOOD, "ROUTES": {listed: policy}}, [OURS], *patterns)
    assert (number, f"ONCEKEY['ROUTES'] has {listed!r}" in message) == ("oncekey.W003", True)
    assert meant in hint


@pytest.mark.parametrize("listed", ["POST /payments/{id}/", "POST /payments/{pk}/", "PATCH /payments/7/"])
@pytest.mark.parametrize(
    "pattern",
    [
        path("payments/<int:pk>/", pay),
        re_path(r"^payments/(?P<pk>[0-9]+)/$", pay),
        path("payments/", include([path("<int:pk>/", pay)])),
    ],
    ids=["path", "regex", "include"],
)
def test_route_that_the_project_has_is_not_named(listed: str, pattern: Any) -> None:
    assert checked({**GOOD, "ROUTES": {listed: None}}, [OURS], pattern) == []


def test_view_with_two_declarations_is_named() -> None:
    """The first request would be refused with the same sentence."""

    @conf.once.policy(effects="repeatable")
    def declared(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    class Declared(View):
        @conf.once.policy(effects="repeatable")
        def post(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    for view in (declared, Declared.as_view()):
        found = checked({**GOOD, "ROUTES": {"POST /pay": {}}}, [OURS], path("pay", view))
        ((number, message, hint),) = found
        assert number == "oncekey.E010"
        assert "POST /pay has two declarations: @once.policy at" in message
        assert "ONCEKEY['ROUTES']" in hint
        conf.once.reset()
        assert checked(GOOD, [OURS], path("pay", view)) == []
        conf.once.reset()


def test_async_view_under_atomic_requests_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django refuses it at its first request, and not at the start."""

    async def awaited(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @transaction.non_atomic_requests
    async def taken_out(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    patterns = path("awaited", awaited), path("out", taken_out), path("pay", pay)
    assert checked(GOOD, [OURS], *patterns) == []
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    ((number, message, hint),) = checked(GOOD, [OURS], *patterns)
    assert (number, "'/awaited'" in message) == ("oncekey.W004", True)
    assert "awaited, is async" in message
    assert "non_atomic_requests" in hint


def test_routes_are_not_looked_at_if_a_setting_is_wrong() -> None:
    found = checked({**GOOD, "PROFILE": "strype", "ROUTES": {"POST /nowhere": None}})
    assert [number for number, _, _ in found] == ["oncekey.E007"]


def test_alias_of_a_file_is_that_file(file_alias: str) -> None:
    name = Path(connections.settings[file_alias]["NAME"])
    with override_settings(ONCEKEY={**GOOD, "STORE": file_alias}):
        once = conf.once.get()
    assert once.store.file == name  # type: ignore[attr-defined]
    assert once.engine.own_connection is not None
    assert once.engine.own_connection().alias == file_alias


def test_once_is_made_after_the_test_runner_renamed_its_database(file_alias: str, tmp_path: Path) -> None:
    """Views are imported, and declare policies, before that."""

    def view(request: Any) -> None: ...

    with override_settings(ONCEKEY={**GOOD, "STORE": file_alias}):
        conf.once.policy(effects="repeatable")(view)
        connections[file_alias].settings_dict["NAME"] = tmp_path / "test.sqlite3"
        made = conf.once.get()
    assert made.store.file == tmp_path / "test.sqlite3"  # type: ignore[attr-defined]
    declared = made.declarations.of(view, "POST")
    assert declared is not None
    assert declared.policy == Policy(effects="repeatable")


def test_wrong_option_of_a_declaration_raises_at_the_view() -> None:
    with pytest.raises(ConfigurationError, match="effcts"):
        conf.once.policy(effcts="repeatable")


def test_once_is_a_once_key_for_the_command_line() -> None:
    from oncekey.cli.loader import load

    found: Any = load("oncekey.web.django:once", OnceKey, "an example")
    assert found is conf.once


def test_once_has_the_methods_of_a_once_key() -> None:
    with override_settings(ONCEKEY=GOOD):
        assert isinstance(conf.once.get(), OnceKey)
        assert conf.once.profile == "ietf"
        registered = conf.once.resolver("POST /pay")(lambda inquiry: None)
        assert conf.once.resolvers.of("POST /pay") is registered


def test_every_option_of_a_oncekey_has_a_setting() -> None:
    options = set(inspect.signature(OnceKey).parameters)
    assert set(conf._OPTIONS.values()) == options
