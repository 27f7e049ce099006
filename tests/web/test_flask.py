"""Flask: the answer is stored inside the framework, with the routes, headers and session that Flask gives it."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Blueprint, abort, redirect, request, request_finished, session

from oncekey import current
from oncekey.errors import ConfigurationError
from oncekey.testing.http.payments import MAX_RESPONSE
from oncekey.testing.http.stack import until
from oncekey.web.flask import current_operation, protect
from tests.web.flask_shop import KEY, MakeShop, OutOfStock, broken, pay, replayed

# ---------------------------------------------------------------- blueprints and routes


def test_a_blueprint_with_a_prefix_and_an_error_handler(make_shop: MakeShop) -> None:
    """Routes are known by their whole path, and a blueprint's own error handler is heard."""
    shop = make_shop()
    blueprint = Blueprint("pay", "pay", url_prefix="/v1")

    @blueprint.post("/payments/<int:number>")
    def view(number: int) -> Any:
        shop.calls.append("view")
        if number == 2:
            raise OutOfStock
        return {"number": number, "key": current_operation().key}

    blueprint.register_error_handler(OutOfStock, lambda error: ("out of stock", 410))
    shop.app.register_blueprint(blueprint)
    assert shop.post("/v1/payments/1").json == {"number": 1, "key": "k-1"}
    assert shop.post("/v1/payments/1").json == {"number": 1, "key": "k-1"}
    record = shop.record()
    assert record is not None
    assert record.operation == "POST /v1/payments/1"
    assert shop.post("/v1/payments/2", "k-2").status_code == 410
    assert replayed(shop.post("/v1/payments/2", "k-2"))
    assert shop.runs == 2


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/nowhere", "POST", 404), ("/payments", "PATCH", 405), ("/payments/x", "POST", 404)],
    ids=["no-route", "no-method", "no-converter"],
)
def test_a_request_that_no_view_takes_does_not_use_up_its_key(
    make_shop: MakeShop, path: str, method: str, status: int
) -> None:
    """Flask turned it away before anything ran: the corrected request may come with the same key."""
    shop = make_shop(pay)
    shop.app.add_url_rule("/payments/<int:number>", "one", pay, methods=["POST"])
    shop.app.register_error_handler(404, lambda error: ({"error": "nothing here"}, 404))
    assert shop.app.test_client().open(path, method=method, headers=KEY).status_code == status
    assert shop.state is None
    assert (shop.post().status_code, shop.runs) == (201, 1)


def test_a_redirect_to_the_path_with_a_slash_does_not_use_up_the_key(make_shop: MakeShop) -> None:
    """The client comes again with the same key and another path, and must not find it taken."""
    shop = make_shop()
    shop.app.add_url_rule("/orders/", "orders", pay, methods=["POST"])
    moved = shop.post("/orders")
    assert (moved.status_code, shop.state) == (308, None)
    assert shop.post("/orders/").status_code == 201


def test_a_404_of_the_view_itself_uses_up_the_key(make_shop: MakeShop) -> None:
    """It ran, and this is its answer."""
    shop = make_shop(lambda: abort(404))
    assert (shop.post().status_code, shop.state) == (404, "failed")


def test_a_redirect_of_the_view_is_stored(make_shop: MakeShop) -> None:
    """A 303 to the result is as good an answer as a 201."""
    shop = make_shop(lambda: redirect("/payments/pay_1", 303))
    first, second = shop.post(), shop.post()
    assert (first.status_code, second.status_code) == (303, 303)
    assert first.headers["Location"] == second.headers["Location"] == "/payments/pay_1"
    assert shop.runs == 1


# ---------------------------------------------------------------- headers as Flask sends them


@pytest.mark.parametrize("name", ["pay_ü", "pay_€", "pay 1"], ids=["latin", "unicode", "space"])
def test_a_location_that_flask_encodes_is_stored_as_it_was_sent(make_shop: MakeShop, name: str) -> None:
    """Flask writes a Location as a URI when it sends it: the replay has those bytes, and the view runs once."""
    shop = make_shop(lambda: ({}, 201, {"Location": f"/payments/{name}"}))
    first, second = shop.post(), shop.post()
    assert (first.status_code, second.status_code, shop.runs) == (201, 201, 1)
    assert first.headers["Location"] == second.headers["Location"]
    assert first.headers["Location"].isascii()


# ---------------------------------------------------------------- sessions and cookies


def test_a_session_cookie_is_not_replayed(make_shop: MakeShop) -> None:
    """Set-Cookie belongs to the first client: a replay has the response, and no session."""

    def view() -> Any:
        session["user"] = "ann"
        return pay()

    shop = make_shop(view)
    first, second = shop.post(), shop.post()
    assert "session=" in first.headers["Set-Cookie"]
    assert "Set-Cookie" not in second.headers
    assert (first.data, second.status_code) == (second.data, 201)
    record = shop.record()
    assert record is not None
    assert record.response is not None
    assert "set-cookie" not in dict(record.response.headers)


def test_vary_header_of_the_session_is_replayed(make_shop: MakeShop) -> None:
    """Flask adds ``Vary: Cookie`` when it saves the session, after all hooks: it is one of the headers that replay."""

    def view() -> Any:
        session["user"] = "ann"
        return pay()

    shop = make_shop(view)
    first, second = shop.post(), shop.post()
    assert first.headers["Vary"] == "Cookie"
    assert second.headers.get("Vary") == "Cookie"


def test_a_session_that_cannot_be_saved(make_shop: MakeShop) -> None:
    """The view has run and Flask says 500: the key is in doubt. Never a 500 now and a 201 for the same key later."""

    def view() -> Any:
        session["cart"] = object()
        return pay()

    shop = make_shop(view)
    first, second = shop.post(), shop.post()
    assert shop.runs == 1
    assert (first.status_code, second.status_code, shop.state) == (500, 409, "unknown")


def test_failed_listener_makes_the_key_unknown(make_shop: MakeShop) -> None:
    """Of ``request_finished``, which Flask sends before the response is ours: its 500 leaves the key in doubt."""
    shop = make_shop(pay)

    def stumbles(*_: Any, **__: Any) -> None:
        raise RuntimeError("in a listener")

    with request_finished.connected_to(stumbles, shop.app):
        first = shop.post()
    second = shop.post()
    assert shop.runs == 1
    assert (first.status_code, second.status_code, shop.state) == (500, 409, "unknown")


def test_an_app_is_protected_once(make_shop: MakeShop) -> None:
    shop = make_shop(pay)
    with pytest.raises(ConfigurationError, match="protected already"):
        protect(shop.app, shop.once)


# ---------------------------------------------------------------- testing


@pytest.mark.parametrize("setting", ["TESTING", "PROPAGATE_EXCEPTIONS"])
def test_exception_of_a_view_reaches_the_test_client(make_shop: MakeShop, setting: str) -> None:
    """With TESTING the developer sees the exception itself, and the key is in doubt as in production."""
    shop = make_shop(broken)
    shop.app.config[setting] = True
    with pytest.raises(RuntimeError, match="after the charge"):
        shop.post()
    assert shop.state == "unknown"
    assert shop.post().status_code == 409
    assert shop.runs == 1


def test_while_testing_a_view_runs_once_as_well(make_shop: MakeShop) -> None:
    """``app.test_client()`` goes through the protection."""
    shop = make_shop(pay, testing=True)
    with shop.app.test_client() as client:
        first = client.post("/payments", headers=KEY)
        assert request.path == "/payments"  # the client keeps the context of the last request
        second = client.post("/payments", headers=KEY)
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert (shop.runs, replayed(second)) == (1, True)
    with pytest.raises(LookupError):
        current()


# ---------------------------------------------------------------- the store fails


def test_an_answer_that_cannot_be_stored_is_not_sent(make_shop: MakeShop) -> None:
    """503 in the place of the view's 201, which the retry gets once the keeper has stored it."""
    shop = make_shop(pay)
    shop.store.down = {"swap"}
    refused = shop.post()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert b"pay_1" not in refused.data
    shop.store.down = set()
    shop.once.engine.keeper._wake.set()
    until(lambda: shop.state == "completed", "the keeper stores it")
    again = shop.post()
    assert (again.json, replayed(again), shop.runs) == ({"id": "pay_1"}, True, 1)


def test_a_large_answer_that_cannot_be_stored_is_not_sent_either(make_shop: MakeShop) -> None:
    """Its body is known whole when it is stored, so the client gets a clean 503 and not the 201 without its end."""
    shop = make_shop(lambda: ("x" * (MAX_RESPONSE + 1), 201))
    shop.store.down = {"swap"}
    refused = shop.post()
    assert (refused.status_code, refused.content_type) == (503, "application/problem+json")
    shop.store.down = set()
    shop.once.engine.keeper._wake.set()
    until(lambda: shop.state == "completed", "the keeper stores the tombstone")
    assert (shop.post().status_code, shop.runs) == (201, 1)


def test_with_the_store_down_flask_is_not_entered(make_shop: MakeShop) -> None:
    """Not even before_request runs: nothing of the app does."""
    shop = make_shop(pay)
    shop.app.before_request(lambda: shop.calls.append("before"))
    shop.store.down = {"reserve"}
    assert shop.post().status_code == 503
    assert shop.calls == []
