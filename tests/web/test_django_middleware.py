"""Other middleware around a view of Django: it is always known whether the view was entered, and what it answered."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey import Policy, current
from oncekey.core.states import State
from oncekey.engine.operation import _current
from tests.web import django_middleware
from tests.web.django_apps import configure
from tests.web.django_site import Site

configure()

from django.core.handlers.base import BaseHandler  # noqa: E402 - Django is configured first
from django.http import HttpResponse  # noqa: E402
from django.urls import reverse  # noqa: E402
from django.views import View  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402
from django.views.decorators.http import require_POST  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

from oncekey.web.wsgi import IdempotencyMiddleware  # noqa: E402

pytestmark = pytest.mark.frameworks
HERE = "tests.web.django_middleware"
OURS = "tests.web.django_apps.protect"
CALLERS = ["CallsView", "CallsMatch", "CallsInnermost", "InThread", "InThreadWithContext"]


class Ran:
    """Views that count, and answer 402."""

    def __init__(self) -> None:
        self.times = 0

    def pay(self, request: Any) -> HttpResponse:
        self.times += 1
        assert current().key == "k-1"
        return HttpResponse(b"no funds", status=402)

    def view(self, kind: str) -> Any:
        pay = self.pay

        def plain(request: Any) -> Any:
            return pay(request)

        async def awaited(request: Any) -> Any:
            return pay(request)

        class OfDjango(View):
            post = staticmethod(pay)

        class OfRest(APIView):
            def post(self, request: Any) -> Any:
                pay(request)
                return Response({}, status=402)

        views = {"function": require_POST(plain), "class": OfDjango.as_view(), "drf": OfRest.as_view()}
        return {**views, "async": awaited}[kind]


@pytest.fixture
def ran() -> Ran:
    return Ran()


@pytest.fixture(params=["wsgi", "asgi"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(view: Any, **options: Any) -> Site:
        made.append(Site(view, asgi=request.param == "asgi", **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


def tries(site: Site) -> list[int]:
    return [site.post().status_code for _ in range(3)]


@pytest.mark.parametrize("effects", ["external", "transactional"])
@pytest.mark.parametrize("kind", ["function", "class", "drf", "async"])
def test_second_middleware_has_no_effect(make: Callable[..., Site], ran: Ran, kind: str, effects: Any) -> None:
    between = ["django.middleware.common.CommonMiddleware", OURS]
    site = make(ran.view(kind), inside=between, policy=Policy(effects=effects))
    assert (tries(site), ran.times, site.state()) == ([402, 402, 402], 1, State.FAILED)


def test_middleware_around_django_keeps_its_operation(ran: Ran) -> None:
    site = Site(ran.view("function"), asgi=False)
    site.app = IdempotencyMiddleware(site.app, site.once)
    assert (tries(site), ran.times, site.state()) == ([402, 402, 402], 1, State.FAILED)
    site.close()


@pytest.mark.parametrize("effects", ["external", "transactional"])
@pytest.mark.parametrize("kind", ["function", "class", "drf"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("caller", CALLERS)
def test_view_that_middleware_calls_is_entered(
    make: Callable[..., Site], ran: Ran, caller: str, where: str, kind: str, effects: Any
) -> None:
    site = make(ran.view(kind), policy=Policy(effects=effects), **{where: [f"{HERE}.{caller}"]})
    assert (tries(site), ran.times, site.state()) == ([402, 402, 402], 1, State.FAILED)


def test_pool_of_middleware_keeps_no_operation(make: Callable[..., Site], ran: Ran) -> None:
    site = make(ran.view("drf"), inside=[f"{HERE}.InThread"])
    site.post()
    for _ in range(4):
        assert django_middleware.pool.submit(_current.get).result() is None


def test_view_that_a_thread_enters_after_the_answer_is_not_called(make: Callable[..., Site], ran: Ran) -> None:
    """The key is unused by then, and a retry may run."""
    go = threading.Event()
    django_middleware.begin[:] = [lambda: go.wait(10.0)]
    site = make(ran.view("function"), inside=[f"{HERE}.TimesOut"])
    assert site.post().status_code == 429
    go.set()
    django_middleware.late.pop().exception(10.0)
    assert ran.times == 0


def test_request_that_outer_middleware_sends_twice_runs_once(make: Callable[..., Site], ran: Ran) -> None:
    site = make(ran.view("function"), outside=[f"{HERE}.SendsTwice"])
    assert (site.post().headers["idempotency-replayed"], ran.times) == ("true", 1)


def test_middleware_that_knows_the_view_may_refuse_it(make: Callable[..., Site], ran: Ran) -> None:
    """The view was not entered, so the key is unused."""
    view = ran.view("function")
    django_middleware.Refuses.refused = {view}
    site = make(view, inside=[f"{HERE}.Refuses"])
    assert (site.post().status_code, ran.times, site.state()) == (403, 0, None)


def test_view_keeps_its_attributes_and_its_address(make: Callable[..., Site]) -> None:
    seen: list[Any] = []

    @csrf_exempt
    def view(request: Any) -> Any:
        found = request.resolver_match.func
        seen.append((found == view, found.__name__, found.csrf_exempt, reverse(found, urlconf=request.urlconf)))
        return HttpResponse(status=201)

    site = make(view, inside=["django.middleware.csrf.CsrfViewMiddleware"])
    assert site.post().status_code == 201
    assert seen == [(True, "view", True, "/pay")]


def test_error_about_a_view_without_a_response_names_the_view(
    make: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    def forgets(request: Any) -> None:
        pass

    with caplog.at_level(logging.ERROR, "django.request"):
        make(forgets).post()
    assert "The view tests.web.test_django_middleware.forgets didn't return an HttpResponse" in caplog.text


def test_views_report_if_another_tool_has_wrapped_django_first(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    """Sentry wraps ``make_view_atomic`` with functools.wraps, in the settings."""
    for name in ("make_view_atomic", "resolve_request", "check_response"):
        monkeypatch.setattr(BaseHandler, name, getattr(BaseHandler, name).__wrapped__)
    make_view_atomic = BaseHandler.make_view_atomic

    @functools.wraps(make_view_atomic)
    def of_a_tool(self: BaseHandler, view: Any) -> Any:
        return make_view_atomic(self, view)

    monkeypatch.setattr(BaseHandler, "make_view_atomic", of_a_tool)
    site = Site(ran.view("function"), asgi=False)
    assert (tries(site), ran.times) == ([402, 402, 402], 1)
    site.close()
