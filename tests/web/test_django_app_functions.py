"""What Django's log has when the app's own functions raise: ``SCOPE``, ``AUTHORIZE``, the bind function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey import NotAuthenticated, OnceKey, Policy
from tests.web.django_apps import configure
from tests.web.django_site import Site

configure()

from django.http import HttpResponse  # noqa: E402 - Django is configured first
from django.test import RequestFactory  # noqa: E402

from oncekey.web.django.status import status_view  # noqa: E402

pytestmark = pytest.mark.frameworks
SECRET = "X-Tenant: secret-of-ann"


@pytest.fixture(params=["wsgi", "asgi"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**options: Any) -> Site:
        made.append(Site(never_called, asgi=request.param == "asgi", **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


def never_called(request: Any) -> HttpResponse:
    raise AssertionError("the view ran")


def raises(*arguments: Any) -> str:
    raise KeyError(SECRET)


async def raises_async(*arguments: Any) -> str:
    return raises(*arguments)


def of_user(request: Any) -> str:
    return str(request.user.pk)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "oncekey" and each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("options", "function", "advice"),
    [
        ({"scope": raises}, "ONCEKEY['SCOPE']", "raise oncekey.NotAuthenticated"),
        ({"authorize": raises}, "ONCEKEY['AUTHORIZE']", "raise oncekey.NotAuthorized"),
        ({"policy": Policy(bind=raises)}, "Policy(bind=…)", "names the user"),
        ({"scope": of_user}, "ONCEKEY['SCOPE']", "'django.contrib.auth.middleware.AuthenticationMiddleware' above"),
    ],
    ids=["scope", "authorize", "bind", "no-user"],
)
def test_function_that_raises_is_logged_once_with_what_to_do(
    make: Callable[..., Site],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: Any,
    function: str,
    advice: str,
) -> None:
    monkeypatch.setattr("oncekey.core.binding.secrets_of", lambda given: (b"s" * 32,))
    site = make(**options)
    assert [site.post(key).status_code for key in ("k-1", "k-2")] == [500, 500]
    (line,) = told(caplog)
    assert line.startswith("POST /pay: the function of ")
    assert function in line
    assert advice in line
    assert "a request got a 500" in line
    (record,) = [record for record in caplog.records if record.name == "oncekey"]
    assert SECRET not in line + (record.exc_text or "")
    assert "Traceback" in (record.exc_text or "")
    assert site.state() is None


def test_two_causes_are_two_lines(make: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    causes: list[Exception] = [KeyError("a"), ValueError("b"), KeyError("c")]

    def scope(request: Any) -> str:
        raise causes.pop()

    site = make(scope=scope)
    assert [site.post(f"k-{n}").status_code for n in range(3)] == [500] * 3
    assert [line.partition("raised ")[2].partition(":")[0].partition(",")[0] for line in told(caplog)] == [
        "KeyError",
        "ValueError",
    ]


def test_async_function_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(never_called, asgi=True, scope=raises_async)
    try:
        assert site.post().status_code == 500
    finally:
        site.close()
    assert "ONCEKEY['SCOPE'] raised KeyError" in told(caplog)[0]


def test_unknown_caller_is_no_error(make: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    def scope(request: Any) -> str:
        raise NotAuthenticated

    assert make(scope=scope).post().status_code == 401
    assert told(caplog) == []


def test_tenant_that_is_a_number_says_to_write_str(make: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    assert make(scope=lambda request: 7).post().status_code == 500
    (line,) = told(caplog)
    assert "the scope function returned a value of the type int" in line
    assert "Write str(…) around it" in line


def test_function_that_raises_on_the_status_endpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    once = OnceKey("memory://", scope=raises)
    with once, pytest.raises(KeyError):
        status_view(once)(RequestFactory().get("/idempotency/k-1"), key="k-1")
    assert "the status endpoint: the function of ONCEKEY['SCOPE'] or" in told(caplog)[0]
