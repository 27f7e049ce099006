"""Lines of oncekey's log that a Django project gets in its own words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey import Policy
from oncekey.errors import EnlistError
from tests.web.django_apps import configure
from tests.web.django_site import Site

configure()

from django.http import HttpResponse  # noqa: E402 - Django is configured first
from django.test import override_settings  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402
from django.views.decorators.http import require_http_methods, require_POST  # noqa: E402

from oncekey.web.django import conf, endpoints  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.fixture(params=["wsgi", "asgi"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(view: Any, **options: Any) -> Site:
        made.append(Site(view, asgi=request.param == "asgi", **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "oncekey" and each.levelno >= logging.WARNING]


def raises(request: Any) -> HttpResponse:
    raise KeyError("of the view")


class CatchAll:
    """Middleware that answers 200 for every exception of a view."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self.get_response(request)

    def process_exception(self, request: Any, error: Exception) -> HttpResponse:
        return HttpResponse(b"all is well")


def test_commands_of_the_log_are_those_of_manage_py(caplog: pytest.LogCaptureFixture) -> None:
    with override_settings(ONCEKEY={"STORE": "memory://", "SCOPE": "SINGLE_TENANT"}):
        of_settings = conf.make()
    site = Site(raises, asgi=False)
    site.once.engine.command = of_settings.engine.command
    try:
        assert site.post().status_code == 500
    finally:
        site.close()
        of_settings.close()
    (line,) = [line for line in told(caplog) if "left a key" in line]
    assert "`manage.py oncekey keys resolve " in line
    assert "`oncekey" not in line
    assert "--store" not in line


def test_success_in_place_of_an_exception_is_logged(
    make: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    site = make(raises, policy=Policy(effects="repeatable"), inside=[f"{__name__}.CatchAll"])
    assert [site.post(key).status_code for key in ("k-1", "k-2")] == [500, 500]
    (line,) = told(caplog)
    assert line.startswith("POST /pay: its handler raised KeyError, and middleware or an error handler answered 200")


def test_error_of_enlist_is_logged_once_and_names_the_route(
    make: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    def view(request: Any) -> HttpResponse:
        raise EnlistError("not here")

    assert make(view, policy=Policy(effects="repeatable")).post().status_code == 500
    assert told(caplog) == ["POST /pay: the view raised an error of oncekey: not here"]


@pytest.mark.parametrize(
    ("decorate", "methods"),
    [
        (require_POST, ["POST"]),
        (require_http_methods(["GET", "PUT"]), ["GET", "PUT"]),
        (lambda view: csrf_exempt(require_POST(view)), ["POST"]),
        (lambda view: view, ["POST", "PUT", "PATCH", "DELETE"]),
    ],
    ids=["require_POST", "require_http_methods", "below another", "none"],
)
def test_routes_of_a_view_are_the_methods_that_it_takes(decorate: Any, methods: list[str]) -> None:
    async def awaited(request: Any) -> HttpResponse:
        return HttpResponse()

    assert endpoints._methods(decorate(raises)) == methods
    assert endpoints._methods(decorate(awaited)) == methods
