"""Flask-CORS adds its headers to answers of ours too: a browser could not read them otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from oncekey import OnceKey
from oncekey.web import flask as once_flask
from tests.web.retrying_client import KEY

flask_cors = pytest.importorskip("flask_cors")

SHOP = "https://shop.test"


@pytest.mark.parametrize("when", ["before", "after"])
def test_cors_headers_are_on_every_answer(once: OnceKey, when: str) -> None:
    app = Flask("shop")
    if when == "before":
        flask_cors.CORS(app, origins=[SHOP])
    once_flask.protect(app, once)
    if when == "after":
        flask_cors.CORS(app, origins=[SHOP])

    @app.post("/pay")
    def view() -> Any:
        return {"paid": True}, 201

    client = app.test_client()

    def post(amount: int, headers: dict[str, str]) -> Any:
        return client.post("/pay", json={"amount": amount}, headers={"origin": SHOP, **headers})

    said = [post(1, {}), post(1, KEY), post(1, KEY), post(2, KEY)]
    assert [answer.status_code for answer in said] == [400, 201, 201, 422]
    for answer in said:
        assert answer.headers.getlist("access-control-allow-origin") == [SHOP]


def test_limits_to_resources_hold_for_our_answers(once: OnceKey) -> None:
    app = Flask("shop")
    flask_cors.CORS(app, resources={"/public/*": {"origins": SHOP}})
    once_flask.protect(app, once)
    for path in ("/public/pay", "/private/pay"):
        app.add_url_rule(path, path.replace("/", "_"), lambda: ({}, 201), methods=["POST"])
    client = app.test_client()
    for path in ("/public/pay", "/private/pay"):
        answer = client.post(path, headers={"origin": SHOP})  # no key
        assert answer.status_code == 400
        assert answer.headers.getlist("access-control-allow-origin") == ([SHOP] if "public" in path else [])


def test_hooks_of_the_app_do_not_run_for_our_answers(once: OnceKey) -> None:
    """They may rely on what the view left: only those of Flask-CORS run."""
    app = Flask("shop")
    flask_cors.CORS(app, origins=[SHOP])
    hooks: list[int] = []

    @app.after_request
    def note(response: Any) -> Any:
        hooks.append(response.status_code)
        return response

    once_flask.protect(app, once)
    app.add_url_rule("/pay", "pay", lambda: ({}, 201), methods=["POST"])
    client = app.test_client()
    for _ in range(3):
        client.post("/pay", headers={"origin": SHOP, **KEY})
    assert hooks == [201]


def test_cross_origin_of_one_view_is_seen_as_its_own_word(once: OnceKey) -> None:
    """The decorator makes the response inside of the view."""
    app = Flask("shop")
    once_flask.protect(app, once)

    @app.post("/pay")
    @flask_cors.cross_origin(origins=[SHOP])
    def view() -> Any:
        return {"error": "declined"}, 402

    client = app.test_client()
    first, second = (client.post("/pay", headers={"origin": SHOP, **KEY}) for _ in range(2))
    assert (first.status_code, second.status_code) == (402, 402)
    assert first.headers["access-control-allow-origin"] == SHOP
    assert second.headers["idempotency-replayed"] == "true"
