"""The setting ONCEKEY: what is wrong with it, the system check names, and says what to write."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.django_apps import configure

configure()

from django.core.checks import run_checks  # noqa: E402 - Django is configured first
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.db import connections  # noqa: E402
from django.test import override_settings  # noqa: E402

from oncekey import SINGLE_TENANT, OnceKey, Policy  # noqa: E402
from oncekey.errors import ConfigurationError  # noqa: E402
from oncekey.web.django import conf  # noqa: E402

GOOD = {"STORE": "memory://", "SCOPE": "SINGLE_TENANT"}
OURS = "oncekey.web.django.OnceKeyMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


def tenant_of(request: Any) -> str:
    return "ann"


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


def checked(said: Any, middleware: Any = (OURS,)) -> list[tuple[str, str, str]]:
    """Id, message and hint of what the checks say."""
    with override_settings(ONCEKEY=said, MIDDLEWARE=list(middleware)):
        return [(each.id or "", each.msg, each.hint or "") for each in run_checks(tags=["oncekey"])]


def test_good_settings_say_nothing() -> None:
    assert checked(GOOD) == []
    assert checked({**GOOD, "SCOPE": "tests.web.test_django_settings.tenant_of", "POLICY": {"effects": "phased"}}) == []
    assert checked({**GOOD, "SCOPE": SINGLE_TENANT, "ROUTES": {"POST /pay": {"effects": "repeatable"}}}) == []


@pytest.mark.parametrize(
    ("said", "number", "message", "hint"),
    [
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
        ({**GOOD, "ROUTES": {"/pay": None}}, "E007", "'/pay' is not of the form", "docs/django.md"),
        ({**GOOD, "PROFILE": "strype"}, "E007", "strype", "docs/django.md"),
        ({**GOOD, "ONLY": "listed"}, "E008", "ONCEKEY['ONLY'] is 'listed'", "'declared'"),
        ({**GOOD, "UPKEEP": "yes"}, "E008", "ONCEKEY['UPKEEP'] is 'yes'", "'auto'"),
    ],
    ids=str,
)
def test_wrong_setting_is_named_and_says_what_to_write(said: Any, number: str, message: str, hint: str) -> None:
    ((found, text, advice),) = checked(said)
    assert found == f"oncekey.{number}"
    assert message in text
    assert hint in advice
    assert "secret" not in text + advice


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
