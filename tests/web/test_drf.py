"""Django REST framework: authentication and throttling come first, and a refused serializer leaves the key unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from oncekey import NotExecuted, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.testing.http.flaky import FlakyStore
from oncekey.testing.http.stack import Loop, as_a_server
from tests.web.django_apps import configure, make_handler, urls

configure()

from django.test import override_settings  # noqa: E402 - Django is configured first
from django.urls import include, path  # noqa: E402
from drf_spectacular.generators import SchemaGenerator  # noqa: E402
from drf_spectacular.openapi import AutoSchema  # noqa: E402
from drf_spectacular.settings import spectacular_settings  # noqa: E402
from rest_framework import serializers  # noqa: E402
from rest_framework.authentication import BaseAuthentication  # noqa: E402
from rest_framework.decorators import api_view  # noqa: E402
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated, ValidationError  # noqa: E402
from rest_framework.permissions import BasePermission  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.routers import SimpleRouter  # noqa: E402
from rest_framework.throttling import BaseThrottle  # noqa: E402
from rest_framework.views import APIView  # noqa: E402
from rest_framework.viewsets import ViewSet  # noqa: E402

from oncekey.web import drf  # noqa: E402
from oncekey.web.django import conf  # noqa: E402

pytestmark = pytest.mark.frameworks


class User:
    is_authenticated = True

    def __init__(self, name: str) -> None:
        self.name = name


class ByToken(BaseAuthentication):
    """The user is known only here, not to any middleware."""

    def authenticate(self, request: Any) -> Any:
        name = request.headers.get("x-token", "")
        if name == "wrong":
            raise AuthenticationFailed("bad token")
        return (User(name), None) if name else None

    def authenticate_header(self, request: Any) -> str:
        return "Token"


class HasUser(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        if request.user is None:
            raise NotAuthenticated
        return bool(request.user.name != "intern")


class Throttle(BaseThrottle):
    allowed = True

    def allow_request(self, request: Any, view: Any) -> bool:
        return type(self).allowed

    def wait(self) -> float:
        return 7.0


class Payment(serializers.Serializer):
    amount = serializers.IntegerField(min_value=1)


class Receiver(serializers.Serializer):
    iban = serializers.CharField()


def tenant_of(request: Any) -> str:
    return str(request.user.name)


class Shop:
    """An API of one view, and its client."""

    def __init__(self, post: Callable[..., Any], *, asgi: bool, policy: Policy | None = None) -> None:
        self.runs: list[str] = []
        shop = self
        self.store = FlakyStore()
        self.once = OnceKey(self.store, scope=tenant_of, policy=policy or Policy())

        class Pay(APIView):
            authentication_classes = (ByToken,)
            permission_classes = (HasUser,)
            throttle_classes = (Throttle,)

            def post(self, request: Any) -> Any:
                shop.runs.append(current().key)
                return post(request)

        self.app = make_handler(urls(path("pay", Pay.as_view())), self.once, asgi=asgi)
        self._loop = Loop() if asgi else None

    def post(self, body: Any = None, key: str | None = "k-1", token: str = "ann", **more: Any) -> httpx.Response:
        headers = {"X-Token": token} | ({"Idempotency-Key": key} if key else {})
        asked = {"url": "/pay", "headers": headers, **(more or {"json": body or {"amount": 5}})}
        if self._loop is not None:
            answer: httpx.Response = self._loop.start(self._post(asked)).result(20.0)
            return answer
        transport = httpx.WSGITransport(as_a_server(self.app), raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://api") as client:
            return client.post(**asked)

    async def _post(self, asked: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.post(**asked)

    def state(self, key: str = "k-1", scope: str = "ann") -> State | None:
        record = self.once.store.read([(scope, key)])[0]
        return None if record is None else record.state

    def close(self) -> None:
        if self._loop is None:
            self.once.close()
        else:
            self._loop.start(self.once.aclose(grace=2.0)).result(10.0)
            self._loop.close()


@pytest.fixture(params=["wsgi", "asgi"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(post: Callable[..., Any] = pay, **options: Any) -> Shop:
        made.append(Shop(post, asgi=request.param == "asgi", **options))
        return made[-1]

    yield make
    Throttle.allowed = True
    for shop in made:
        shop.close()


def pay(request: Any) -> Any:
    serializer = Payment(data=request.data)
    serializer.is_valid(raise_exception=True)
    return Response({"paid": serializer.validated_data["amount"]}, 201)


def test_view_runs_once_and_replays_its_rendered_response(make: Callable[..., Shop]) -> None:
    shop = make()
    first, again = shop.post(), shop.post()
    assert (first.status_code, first.json()) == (201, {"paid": 5})
    assert (again.status_code, again.content, again.headers["content-type"]) == (201, first.content, "application/json")
    assert again.headers["idempotency-replayed"] == "true"
    assert shop.runs == ["k-1"]


def test_tenant_is_the_user_that_the_view_authenticated(make: Callable[..., Shop]) -> None:
    shop = make()
    shop.post(token="ann")
    shop.post({"amount": 7}, token="bob")
    assert (shop.state(scope="ann"), shop.state(scope="bob")) == (State.COMPLETED, State.COMPLETED)
    assert shop.post({"amount": 7}, token="ann").status_code == 422


@pytest.mark.parametrize(("token", "status"), [("", 401), ("wrong", 401), ("intern", 403)])
def test_refused_caller_gets_no_replay_and_asks_no_store(make: Callable[..., Shop], token: str, status: int) -> None:
    shop = make()
    shop.post()
    shop.store.down = {"reserve", "read", "swap"}
    refused = shop.post(token=token)
    assert refused.status_code == status
    assert "idempotency-replayed" not in refused.headers
    assert shop.runs == ["k-1"]


def test_throttled_request_leaves_its_key_unused_and_gets_no_replay(make: Callable[..., Shop]) -> None:
    shop = make()
    shop.post()
    Throttle.allowed = False
    for key in ("k-1", "k-2"):
        refused = shop.post(key=key)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert shop.state("k-2") is None
    Throttle.allowed = True
    assert shop.post(key="k-2").status_code == 201


@pytest.mark.parametrize("refuses", [False, True])
def test_exception_of_a_function_inside_does_not_give_the_key_back(make: Callable[..., Shop], refuses: bool) -> None:
    """NotExecuted, and a serializer that refuses what the function was given: the view may have charged before."""

    def pay_and_mail(request: Any) -> Any:
        @shop.once.function("mail", key=lambda: "a", scope=lambda: "ann")
        def mail() -> None:
            if not refuses:
                raise NotExecuted("the mail server is down")
            Payment(data={}).is_valid(raise_exception=True)

        mail()

    shop = make(pay_and_mail)
    shop.post()
    assert shop.state() is (State.FAILED if refuses else State.UNKNOWN)
    shop.post()
    assert shop.runs == ["k-1"]


def test_missing_key_is_refused_after_authentication(make: Callable[..., Shop]) -> None:
    shop = make()
    assert shop.post(key=None, token="").status_code == 401
    assert shop.post(key=None).status_code == 400
    assert shop.runs == []


def test_refused_serializer_leaves_the_key_unused(make: Callable[..., Shop]) -> None:
    shop = make()
    refused = shop.post({"amount": 0})
    assert (refused.status_code, shop.state()) == (400, None)
    assert shop.post({"amount": 5}).status_code == 201  # the same key, the corrected body


def test_serializer_that_is_asked_without_raising_leaves_the_key_unused(make: Callable[..., Shop]) -> None:
    def post(request: Any) -> Any:
        serializer = Payment(data=request.data)
        if not serializer.is_valid():
            return Response(serializer.errors, 400)
        return Response({"paid": 1}, 201)

    shop = make(post)
    assert (shop.post({"amount": 0}).status_code, shop.state()) == (400, None)
    assert shop.post().status_code == 201


def test_list_of_serializers_that_is_refused_leaves_the_key_unused(make: Callable[..., Shop]) -> None:
    def post(request: Any) -> Any:
        Payment(data=request.data, many=True).is_valid(raise_exception=True)
        return Response({}, 201)

    shop = make(post)
    assert (shop.post([{"amount": 0}]).status_code, shop.state()) == (400, None)


def test_refusal_after_a_validation_that_passed_is_final(make: Callable[..., Shop]) -> None:
    """By then the handler may have charged."""

    def post(request: Any) -> Any:
        Payment(data=request.data).is_valid(raise_exception=True)
        Receiver(data=request.data).is_valid(raise_exception=True)

    shop = make(post)
    first = shop.post()
    assert (first.status_code, shop.state()) == (400, State.FAILED)
    assert shop.post().content == first.content
    assert shop.runs == ["k-1"]


def test_validation_error_without_a_serializer_is_final(make: Callable[..., Shop]) -> None:
    """The provider declined: the view itself raises it, and no serializer refused anything."""

    def post(request: Any) -> Any:
        raise ValidationError("the card was declined")

    shop = make(post)
    assert (shop.post().status_code, shop.state()) == (400, State.FAILED)


@pytest.mark.parametrize(
    ("body", "kind", "status"), [(b"{not json", "application/json", 400), (b"<a/>", "application/xml", 415)]
)
def test_body_that_no_parser_reads_leaves_the_key_unused(
    make: Callable[..., Shop], body: bytes, kind: str, status: int
) -> None:
    shop = make()
    headers = {"X-Token": "ann", "Idempotency-Key": "k-1", "Content-Type": kind}
    assert shop.post(content=body, headers=headers).status_code == status
    assert shop.state() is None


def test_serializer_refused_after_the_operation_began_is_final(make: Callable[..., Shop]) -> None:
    def post(request: Any) -> Any:
        current().downstream_key("charge")
        Payment(data=request.data).is_valid(raise_exception=True)

    shop = make(post)
    assert (shop.post({"amount": 0}).status_code, shop.state()) == (400, State.FAILED)


def test_raised_exception_of_the_view_is_unknown(make: Callable[..., Shop]) -> None:
    def post(request: Any) -> Any:
        raise RuntimeError("after the charge")

    shop = make(post)
    assert (shop.post().status_code, shop.state()) == (500, State.UNKNOWN)


# ---------------------------------------------------------------- other kinds of views, declarations, the schema


class Orders(ViewSet):
    authentication_classes = (ByToken,)
    permission_classes = (HasUser,)

    def create(self, request: Any) -> Any:
        return Response({"operation": current().name, "effects": current().policy.effects}, 201)

    def partial_update(self, request: Any, pk: str) -> Any:
        return Response({"operation": current().name}, 200)


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=tenant_of) as made:
        yield made


def ask(app: Any, method: str, where: str) -> httpx.Response:
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://api") as client:
        return client.request(method, where, headers={"X-Token": "ann", "Idempotency-Key": f"k-{where}"}, json={})


def test_viewset_is_declared_at_its_action_and_its_class(once: OnceKey) -> None:
    class Declared(Orders):
        @once.policy(effects="repeatable")
        def create(self, request: Any) -> Any:
            return super().create(request)

    @once.policy(effects="phased")
    class Whole(Orders):
        pass

    router = SimpleRouter()
    router.register("orders", Declared, "orders")
    router.register("whole", Whole, "whole")
    app = make_handler(urls(path("", include(router.urls))), once, asgi=False)
    assert ask(app, "POST", "/orders/").json() == {"operation": "POST /orders/", "effects": "repeatable"}
    assert ask(app, "POST", "/whole/").json() == {"operation": "POST /whole/", "effects": "phased"}
    assert ask(app, "PATCH", "/orders/7/").status_code == 200


def test_function_view_is_declared_above_api_view() -> None:
    single = OnceKey("memory://", scope=lambda request: "all")

    @single.policy(effects="repeatable")
    @api_view(["POST"])
    def pay_plainly(request: Any) -> Any:
        return Response({"effects": current().policy.effects}, 201)

    app = make_handler(urls(path("pay", pay_plainly)), single, asgi=False)
    assert ask(app, "POST", "/pay").json() == {"effects": "repeatable"}
    single.close()


def test_schema_declares_header_and_answers() -> None:
    class Documented(APIView):
        schema = AutoSchema()

        def post(self, request: Any) -> Any: ...

        def get(self, request: Any) -> Any: ...

    class Exempt(Documented):
        schema = AutoSchema()

    conf.once.reset()
    routes = {"POST /exempt/{id}": None}
    with override_settings(ONCEKEY={"STORE": "memory://", "SCOPE": "tests.web.test_drf.tenant_of", "ROUTES": routes}):
        patterns = [path("pay/<id>", Documented.as_view()), path("exempt/<id>", Exempt.as_view())]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spectacular_settings, "POSTPROCESSING_HOOKS", [drf.schema_hook])
            document = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)
    conf.once.reset()
    post = document["paths"]["/pay/{id}"]["post"]
    assert "Idempotency-Key" in [each["name"] for each in post["parameters"]]
    assert {"400", "401", "409", "413", "422", "503"} <= set(post["responses"])
    assert post["x-idempotency"]["effects"] == "external"
    assert "x-idempotency" not in document["paths"]["/pay/{id}"]["get"]
    assert "x-idempotency" not in document["paths"]["/exempt/{id}"]["post"]
