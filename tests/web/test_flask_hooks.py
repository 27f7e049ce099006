"""Flask: the answer is stored as the app's own error handlers and hooks have made it, and before its teardown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, abort, after_this_request, g, redirect
from werkzeug.routing import RequestRedirect

from oncekey import NotExecuted, OutcomeUnknown, Refused
from oncekey.web.flask import protect
from tests.web.flask_shop import MakeShop, OutOfStock, broken, pay, replayed

# ---------------------------------------------------------------- the app's error handlers


def test_an_error_handler_that_answers_4xx(make_shop: MakeShop) -> None:
    """What the app makes of its own exception is the answer: a 4xx is stored and replayed."""

    def view() -> Any:
        raise OutOfStock

    shop = make_shop(view)
    shop.app.register_error_handler(OutOfStock, lambda error: ({"error": "out of stock"}, 409))
    first, second = shop.post(), shop.post()
    assert (first.status_code, first.json, second.json) == (409, {"error": "out of stock"}, {"error": "out of stock"})
    assert (shop.runs, shop.state, replayed(second)) == (1, "failed", True)


@pytest.mark.parametrize("kind", [500, Exception, RuntimeError])
def test_an_error_handler_that_answers_5xx_does_not_hide_that_the_view_raised(make_shop: MakeShop, kind: Any) -> None:
    """A nicer page for an error is still an error: an external effect stays in doubt."""
    shop = make_shop(broken)
    shop.app.register_error_handler(kind, lambda error: ({"error": "sorry"}, 500))
    first = shop.post()
    assert (first.json, shop.state) == ({"error": "sorry"}, "unknown")
    assert shop.post().status_code == 409
    assert shop.runs == 1


@pytest.mark.parametrize(
    ("effects", "status", "state"),
    [("external", 409, "unknown"), ("transactional", 500, "failed_retryable"), ("repeatable", 500, "failed_retryable")],
)
def test_success_of_an_error_handler_is_replaced_by_an_error_of_ours(
    make_shop: MakeShop, effects: Any, status: int, state: str
) -> None:
    """The view raised, so its transaction is rolled back: the client must not read that it was paid."""
    shop = make_shop(broken, effects=effects)
    shop.app.register_error_handler(RuntimeError, lambda error: ({"id": "pay_1"}, 201))
    answer = shop.post()
    assert (answer.status_code, answer.content_type, shop.state) == (status, "application/problem+json", state)
    assert b"pay_1" not in answer.data


@pytest.mark.parametrize("how", ["abort", "raise"])
def test_redirect_that_a_view_raises_is_stored(make_shop: MakeShop, how: str) -> None:
    """``abort(redirect(…))`` is the view's own answer."""

    def view() -> Any:
        if how == "abort":
            abort(redirect("/receipt", 303))
        raise RequestRedirect("/receipt")

    shop = make_shop(view)
    first, second = shop.post(), shop.post()
    assert (first.status_code, first.headers["Location"]) == (303 if how == "abort" else 308, "/receipt")
    assert (shop.state, shop.runs, replayed(second)) == ("completed", 1, True)


def test_an_error_handler_that_raises_itself(make_shop: MakeShop) -> None:
    """Two errors are no better than one."""

    def handler(error: Exception) -> Any:
        raise ValueError("in the handler")

    shop = make_shop(broken)
    shop.app.register_error_handler(RuntimeError, handler)
    assert (shop.post().status_code, shop.state) == (500, "unknown")


@pytest.mark.parametrize(
    ("ours", "status", "state"),
    [(NotExecuted("closed"), 503, "failed_retryable"), (OutcomeUnknown("no answer"), 409, "unknown")],
    ids=["not-executed", "unknown"],
)
def test_an_error_handler_that_translates_into_one_of_ours(
    make_shop: MakeShop, ours: Exception, status: int, state: str
) -> None:
    """``raise NotExecuted`` always means what it says, also where an error handler knows it better than the view."""

    def view() -> Any:
        raise OutOfStock

    def translate(error: Exception) -> Any:
        raise ours from error

    shop = make_shop(view)
    shop.app.register_error_handler(OutOfStock, translate)
    answer = shop.post()
    assert (answer.status_code, answer.content_type, shop.state) == (status, "application/problem+json", state)


# ---------------------------------------------------------------- after_request


def test_changes_by_after_request_functions_are_stored(make_shop: MakeShop) -> None:
    """Functions of the app, of a blueprint and of the view itself have all run on what is stored."""
    shop = make_shop()
    blueprint = Blueprint("pay", "pay")

    def appends(name: str) -> Callable[[Response], Response]:
        def after(response: Response) -> Response:
            response.set_data(f"{response.get_data(as_text=True)} {name}")
            response.headers["Link"] = f"<{name}>"
            return response

        return after

    @blueprint.post("/payments")
    def view() -> str:
        shop.calls.append("view")
        after_this_request(appends("this"))
        return "paid"

    blueprint.after_request(appends("blueprint"))
    shop.app.after_request(appends("first"))
    shop.app.after_request(appends("second"))
    shop.app.register_blueprint(blueprint)
    first, second = shop.post(), shop.post()
    assert first.text == second.text == "paid this blueprint second first"
    assert first.headers["Link"] == second.headers["Link"] == "<first>"
    assert first.headers["Content-Length"] == second.headers["Content-Length"]
    assert (shop.runs, replayed(second)) == (1, True)


def test_an_after_request_function_that_was_there_before_us(make_shop: MakeShop) -> None:
    """It does not matter whether the app registered its hooks before or after it was protected."""
    shop = make_shop()
    app = Flask("early")

    @app.after_request
    def stamp(response: Response) -> Response:
        response.headers["ETag"] = '"stamped"'
        return response

    protect(app, shop.once)
    app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    shop.app = app
    assert shop.post().headers["ETag"] == shop.post().headers["ETag"] == '"stamped"'


def test_an_after_request_function_that_raises(make_shop: MakeShop) -> None:
    """The view has done its work, and an exception made a 500 of its 201: raised, so an external effect is in doubt."""
    shop = make_shop(pay)

    @shop.app.after_request
    def stumbles(response: Response) -> Response:
        if response.status_code == 201:
            raise RuntimeError("in after_request")
        return response

    assert (shop.post().status_code, shop.state) == (500, "unknown")
    assert shop.post().status_code == 409
    assert shop.runs == 1


def test_an_after_request_function_that_always_raises(make_shop: MakeShop) -> None:
    """The same when it raises for Flask's error page too."""
    shop = make_shop(pay)

    @shop.app.after_request
    def stumbles(response: Response) -> Response:
        raise RuntimeError("in after_request")

    assert (shop.post().status_code, shop.state) == (500, "unknown")
    assert shop.runs == 1


# ---------------------------------------------------------------- teardown


@pytest.mark.parametrize("how", ["returns", "raises", "aborts", "is-refused"])
def test_teardown_runs_after_the_storing(make_shop: MakeShop, how: str) -> None:
    """A session that teardown closes is still open when the answer is stored, however the view ended."""

    def view() -> Any:
        g.connection = "open"
        match how:
            case "raises":
                raise RuntimeError
            case "aborts":
                abort(409)
            case "is-refused":
                raise Refused("not today")
        return pay()

    shop = make_shop(view)
    swap = shop.store.swap

    def noted(batch: Any) -> Any:
        shop.calls.append(f"store {batch[0].event.value}")
        return swap(batch)

    shop.store.swap = noted  # type: ignore[method-assign]
    shop.app.teardown_request(lambda error: shop.calls.append("teardown request"))
    shop.app.teardown_appcontext(lambda error: shop.calls.append("teardown app"))
    shop.post()
    move = {"returns": "complete", "raises": "doubt", "aborts": "fail", "is-refused": "discard"}[how]
    stored, torn = shop.calls.index(f"store {move}"), shop.calls.index("teardown request")
    assert shop.calls.index("view") < stored < torn < shop.calls.index("teardown app")
