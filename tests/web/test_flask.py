"""Flask: the answer is stored inside the framework, as the app's own hooks have made it, before its teardown."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    after_this_request,
    g,
    make_response,
    redirect,
    request,
    request_finished,
    send_file,
    session,
    stream_with_context,
)
from werkzeug.test import TestResponse

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, OutcomeUnknown, Policy, Refused, current
from oncekey.core.record import Record
from oncekey.telemetry import events
from oncekey.web.flask import current_operation, protect
from tests.web.frameworks import MAX_RESPONSE, ONE, FlakyStore, until

KEY = {"Idempotency-Key": "k-1"}


class Shop:
    """A Flask app with one protected view that the test gives; ``calls`` is what happened, in order."""

    def __init__(self, view: Callable[..., Any] | None = None, *, testing: bool = False, **policy: Any) -> None:
        self.calls: list[str] = []
        self.store = FlakyStore()
        self.events: list[events.Event] = []
        policy.setdefault("max_response_bytes", MAX_RESPONSE)
        self.once = OnceKey(self.store, scope=SINGLE_TENANT, policy=Policy(**policy), on_event=self.events.append)
        self.app = Flask("shop")
        self.app.secret_key = "for the tests"
        self.app.testing = testing
        protect(self.app, self.once)
        if view is not None:
            self.app.add_url_rule("/payments", "pay", self.counted(view), methods=["POST"])

    def counted(self, view: Callable[..., Any]) -> Callable[..., Any]:
        def counting(**arguments: Any) -> Any:
            self.calls.append("view")
            return view(**arguments)

        return counting

    @property
    def runs(self) -> int:
        return self.calls.count("view")

    def post(self, path: str = "/payments", key: str | None = "k-1", **more: Any) -> TestResponse:
        """One request, by a client that remembers no cookies."""
        headers = {} if key is None else {"Idempotency-Key": key}
        client = self.app.test_client(use_cookies=False)
        return client.post(path, headers=headers, json={"amount": 1000}, buffered=True, **more)

    def record(self, key: str = "k-1") -> Record | None:
        return self.store.read([(ONE, key)])[0]

    @property
    def state(self) -> str | None:
        record = self.record()
        return record.state.value if record else None


@pytest.fixture
def make() -> Iterator[Callable[..., Shop]]:
    """Makes protected apps; all of them are closed at the end."""
    made: list[Shop] = []

    def make(*args: Any, **options: Any) -> Shop:
        made.append(Shop(*args, **options))
        return made[-1]

    yield make
    for shop in made:
        shop.once.close()


Make = Callable[..., Shop]


def pay() -> Any:
    return {"id": "pay_1"}, 201, {"Location": "/payments/pay_1"}


def broken() -> Any:
    raise RuntimeError("after the charge")


def replayed(answer: TestResponse) -> bool:
    return answer.headers.get("Idempotency-Replayed") == "true"


# ---------------------------------------------------------------- how a view ends (DESIGN, section 4)


@pytest.mark.parametrize(
    ("effects", "state"),
    [
        ("external", "unknown"),
        ("transactional", "failed_retryable"),
        ("phased", "failed_retryable"),
        ("repeatable", "failed_retryable"),
    ],
)
def test_a_view_that_raises(make: Make, effects: Any, state: str) -> None:
    """It may have charged somebody: external effects are in doubt, and all others can be tried again."""
    shop = make(broken, effects=effects)
    assert (shop.post().status_code, shop.state) == (500, state)
    assert shop.post().status_code == (409 if state == "unknown" else 500)
    assert shop.runs == (1 if state == "unknown" else 2)


@pytest.mark.parametrize("effects", ["external", "transactional", "phased", "repeatable"])
def test_a_view_that_returns_500(make: Make, effects: Any) -> None:
    """It said itself that it failed: the key can be tried again, wherever the effects live."""
    shop = make(lambda: ({"error": "no"}, 500), effects=effects)
    first = shop.post()
    assert (first.status_code, first.json, shop.state) == (500, {"error": "no"}, "failed_retryable")
    assert shop.post().status_code == 500
    assert shop.runs == 2


@pytest.mark.parametrize("effects", ["external", "transactional", "phased", "repeatable"])
@pytest.mark.parametrize(
    ("status", "state"), [(400, "failed"), (404, "failed"), (409, "failed"), (429, "failed_retryable")]
)
def test_a_view_that_aborts_with_4xx(make: Make, effects: Any, status: int, state: str) -> None:
    """A 4xx is the answer to this request, raised or returned, and final, unless it is about who or when."""
    shop = make(lambda: abort(status), effects=effects)
    first = shop.post()
    assert (first.status_code, shop.state) == (status, state)
    second = shop.post()
    assert second.status_code == status
    assert second.data == first.data
    assert replayed(second) == (state == "failed")
    assert shop.runs == (1 if state == "failed" else 2)


def test_a_view_that_aborts_with_503_has_raised(make: Make) -> None:
    """An HTTP exception is an exception: an external effect may have happened before it."""
    shop = make(lambda: abort(503))
    assert (shop.post().status_code, shop.state) == (503, "unknown")


def test_a_view_that_aborts_with_a_response_of_its_own(make: Make) -> None:
    """``abort(response)`` is raised as well, and what is stored is that response."""
    shop = make(lambda: abort(make_response({"error": "gone"}, 410)))
    first, second = shop.post(), shop.post()
    assert (first.status_code, first.json, second.json) == (410, {"error": "gone"}, {"error": "gone"})
    assert (shop.runs, replayed(second)) == (1, True)


def test_a_view_that_returns_nothing_has_not_said_how_it_ended(make: Make) -> None:
    """Flask makes a 500 of a forgotten ``return``, after the view has done its work: it counts as raised."""
    shop = make(lambda: None)
    assert (shop.post().status_code, shop.state) == (500, "unknown")
    assert shop.post().status_code == 409
    assert shop.runs == 1


@pytest.mark.parametrize(
    ("error", "status", "state"),
    [
        (NotExecuted("closed"), 503, "failed_retryable"),
        (OutcomeUnknown("no answer"), 409, "unknown"),
        (Refused("not you", status=403), 403, None),
    ],
    ids=["not-executed", "unknown", "refused"],
)
@pytest.mark.parametrize("testing", [False, True])
def test_a_view_that_raises_one_of_ours(
    make: Make, error: Exception, status: int, state: str | None, testing: bool
) -> None:
    """Our exceptions are answered by us, also while testing, and end the attempt as they say."""

    def view() -> Any:
        raise error

    shop = make(view, testing=testing)
    answer = shop.post()
    assert (answer.status_code, shop.state) == (status, state)
    assert answer.content_type == "application/problem+json"
    assert answer.headers["Idempotency-Key"] == "k-1"


def test_ours_raised_in_before_request(make: Make) -> None:
    """A hook that looks at every request may refuse it, before the view, with the key unused."""
    shop = make(pay)

    @shop.app.before_request
    def look() -> None:
        raise Refused("shop closed")

    assert (shop.post().status_code, shop.state, shop.runs) == (422, None, 0)


# ---------------------------------------------------------------- streams


def streaming(*pieces: str, fails: bool = False) -> Callable[[], Response]:
    def view() -> Response:
        def body() -> Iterator[str]:
            yield from pieces
            if fails:
                raise RuntimeError("broke midway")

        return Response(stream_with_context(body()), 201, content_type="text/plain")

    return view


def test_a_view_that_streams_a_little(make: Make) -> None:
    """A small stream is stored whole before the client sees it, and replayed."""
    shop = make(streaming("one,", "two"))
    first, second = shop.post(), shop.post()
    assert first.text == second.text == "one,two"
    assert first.headers["Content-Length"] == second.headers["Content-Length"] == "7"
    assert (shop.runs, shop.state, replayed(second)) == (1, "completed", True)


def test_a_view_that_streams_a_lot(make: Make) -> None:
    """A large one passes through and leaves a tombstone."""
    shop = make(streaming(*["x" * 1000] * 10))
    first, second = shop.post(), shop.post()
    assert first.text == "x" * 10_000
    assert "body-not-kept" in second.text
    assert (shop.runs, shop.state, replayed(second)) == (1, "completed", True)


@pytest.mark.parametrize("pieces", [("one",), ("x" * 1000,) * 10], ids=["small", "large"])
def test_a_stream_that_breaks_midway(make: Make, pieces: tuple[str, ...]) -> None:
    """The view has returned, but its response has not ended: that is no success to store."""
    shop = make(streaming(*pieces, fails=True))
    with pytest.raises(RuntimeError, match="broke midway"):
        shop.post()
    assert shop.state == "unknown"
    assert shop.post().status_code == 409


def test_a_streamed_500_was_returned(make: Make) -> None:
    """Streamed or not, the view returned it: the key can be tried again."""
    shop = make(lambda: Response(iter(["no"]), 500))
    assert (shop.post().status_code, shop.state) == (500, "failed_retryable")


def test_a_file(make: Make, tmp_path: Any) -> None:
    """``send_file`` is a stream: it is stored with its headers."""
    (tmp_path / "receipt.txt").write_text("paid")
    shop = make(lambda: send_file(tmp_path / "receipt.txt", as_attachment=True))
    first, second = shop.post(), shop.post()
    assert first.data == second.data == b"paid"
    assert first.headers["Content-Disposition"] == second.headers["Content-Disposition"]
    assert first.headers["ETag"] == second.headers["ETag"]
    assert (shop.runs, replayed(second)) == (1, True)


# ---------------------------------------------------------------- the app's error handlers


class OutOfStock(Exception):
    pass


def test_an_error_handler_that_answers_4xx(make: Make) -> None:
    """What the app makes of its own exception is the answer: a 4xx is stored and replayed."""

    def view() -> Any:
        raise OutOfStock

    shop = make(view)
    shop.app.register_error_handler(OutOfStock, lambda error: ({"error": "out of stock"}, 409))
    first, second = shop.post(), shop.post()
    assert (first.status_code, first.json, second.json) == (409, {"error": "out of stock"}, {"error": "out of stock"})
    assert (shop.runs, shop.state, replayed(second)) == (1, "failed", True)


@pytest.mark.parametrize("kind", [500, Exception, RuntimeError])
def test_an_error_handler_that_answers_5xx_does_not_hide_that_the_view_raised(make: Make, kind: Any) -> None:
    """A nicer page for an error is still an error: an external effect stays in doubt."""
    shop = make(broken)
    shop.app.register_error_handler(kind, lambda error: ({"error": "sorry"}, 500))
    first = shop.post()
    assert (first.json, shop.state) == ({"error": "sorry"}, "unknown")
    assert shop.post().status_code == 409
    assert shop.runs == 1


def test_an_error_handler_that_answers_2xx(make: Make) -> None:
    """An app that turns an exception into a success has said that it is one."""
    shop = make(broken)
    shop.app.register_error_handler(RuntimeError, lambda error: ({"id": "pay_1"}, 201))
    assert (shop.post().status_code, shop.state) == (201, "completed")
    assert replayed(shop.post())


def test_an_error_handler_that_raises_itself(make: Make) -> None:
    """Two errors are no better than one."""

    def handler(error: Exception) -> Any:
        raise ValueError("in the handler")

    shop = make(broken)
    shop.app.register_error_handler(RuntimeError, handler)
    assert (shop.post().status_code, shop.state) == (500, "unknown")


@pytest.mark.parametrize(
    ("ours", "status", "state"),
    [(NotExecuted("closed"), 503, "failed_retryable"), (OutcomeUnknown("no answer"), 409, "unknown")],
    ids=["not-executed", "unknown"],
)
def test_an_error_handler_that_translates_into_one_of_ours(
    make: Make, ours: Exception, status: int, state: str
) -> None:
    """``raise NotExecuted`` always means what it says, also where an error handler knows it better than the view."""

    def view() -> Any:
        raise OutOfStock

    def translate(error: Exception) -> Any:
        raise ours from error

    shop = make(view)
    shop.app.register_error_handler(OutOfStock, translate)
    answer = shop.post()
    assert (answer.status_code, answer.content_type, shop.state) == (status, "application/problem+json", state)


# ---------------------------------------------------------------- after_request


def test_what_after_request_functions_do_is_stored(make: Make) -> None:
    """Functions of the app, of a blueprint and of the view itself have all run on what is stored."""
    shop = make()
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


def test_an_after_request_function_that_was_there_before_us(make: Make) -> None:
    """It does not matter whether the app registered its hooks before or after it was protected."""
    shop = make()
    app = Flask("early")

    @app.after_request
    def stamp(response: Response) -> Response:
        response.headers["ETag"] = '"stamped"'
        return response

    protect(app, shop.once)
    app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    shop.app = app
    assert shop.post().headers["ETag"] == shop.post().headers["ETag"] == '"stamped"'


def test_an_after_request_function_that_raises(make: Make) -> None:
    """The view has done its work, and an exception made a 500 of its 201: raised, so an external effect is in doubt."""
    shop = make(pay)

    @shop.app.after_request
    def stumbles(response: Response) -> Response:
        if response.status_code == 201:
            raise RuntimeError("in after_request")
        return response

    assert (shop.post().status_code, shop.state) == (500, "unknown")
    assert shop.post().status_code == 409
    assert shop.runs == 1


def test_an_after_request_function_that_always_raises(make: Make) -> None:
    """The same when it raises for Flask's error page too."""
    shop = make(pay)

    @shop.app.after_request
    def stumbles(response: Response) -> Response:
        raise RuntimeError("in after_request")

    assert (shop.post().status_code, shop.state) == (500, "unknown")
    assert shop.runs == 1


# ---------------------------------------------------------------- headers as Flask sends them


@pytest.mark.parametrize("name", ["pay_ü", "pay_€", "pay 1"], ids=["latin", "unicode", "space"])
def test_a_location_that_flask_encodes_is_stored_as_it_was_sent(make: Make, name: str) -> None:
    """Flask writes a Location as a URI when it sends it: the replay has those bytes, and the view runs once."""
    shop = make(lambda: ({}, 201, {"Location": f"/payments/{name}"}))
    first, second = shop.post(), shop.post()
    assert (first.status_code, second.status_code, shop.runs) == (201, 201, 1)
    assert first.headers["Location"] == second.headers["Location"]
    assert first.headers["Location"].isascii()


# ---------------------------------------------------------------- teardown


@pytest.mark.parametrize("how", ["returns", "raises", "aborts", "is-refused"])
def test_teardown_runs_after_the_storing(make: Make, how: str) -> None:
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

    shop = make(view)
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


# ---------------------------------------------------------------- blueprints and routes


def test_a_blueprint_with_a_prefix_and_an_error_handler(make: Make) -> None:
    """Routes are known by their whole path, and a blueprint's own error handler is heard."""
    shop = make()
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
def test_a_request_that_no_view_takes_does_not_use_up_its_key(make: Make, path: str, method: str, status: int) -> None:
    """Flask turned it away before anything ran: the corrected request may come with the same key."""
    shop = make(pay)
    shop.app.add_url_rule("/payments/<int:number>", "one", pay, methods=["POST"])
    shop.app.register_error_handler(404, lambda error: ({"error": "nothing here"}, 404))
    assert shop.app.test_client().open(path, method=method, headers=KEY).status_code == status
    assert shop.state is None
    assert (shop.post().status_code, shop.runs) == (201, 1)


def test_a_redirect_to_the_path_with_a_slash_does_not_use_up_the_key(make: Make) -> None:
    """The client comes again with the same key and another path, and must not find it taken."""
    shop = make()
    shop.app.add_url_rule("/orders/", "orders", pay, methods=["POST"])
    moved = shop.post("/orders")
    assert (moved.status_code, shop.state) == (308, None)
    assert shop.post("/orders/").status_code == 201


def test_a_404_of_the_view_itself_uses_up_the_key(make: Make) -> None:
    """It ran, and this is its answer."""
    shop = make(lambda: abort(404))
    assert (shop.post().status_code, shop.state) == (404, "failed")


def test_a_redirect_of_the_view_is_stored(make: Make) -> None:
    """A 303 to the result is as good an answer as a 201."""
    shop = make(lambda: redirect("/payments/pay_1", 303))
    first, second = shop.post(), shop.post()
    assert (first.status_code, second.status_code) == (303, 303)
    assert first.headers["Location"] == second.headers["Location"] == "/payments/pay_1"
    assert shop.runs == 1


# ---------------------------------------------------------------- testing


@pytest.mark.parametrize("setting", ["TESTING", "PROPAGATE_EXCEPTIONS"])
def test_what_a_view_raises_reaches_the_test(make: Make, setting: str) -> None:
    """With TESTING the developer sees the exception itself, and the key is in doubt as in production."""
    shop = make(broken)
    shop.app.config[setting] = True
    with pytest.raises(RuntimeError, match="after the charge"):
        shop.post()
    assert shop.state == "unknown"
    assert shop.post().status_code == 409
    assert shop.runs == 1


def test_while_testing_a_view_runs_once_as_well(make: Make) -> None:
    """``app.test_client()`` goes through the protection."""
    shop = make(pay, testing=True)
    with shop.app.test_client() as client:
        first = client.post("/payments", headers=KEY)
        assert request.path == "/payments"  # the client keeps the context of the last request
        second = client.post("/payments", headers=KEY)
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert (shop.runs, replayed(second)) == (1, True)
    with pytest.raises(LookupError):
        current()


# ---------------------------------------------------------------- sessions and cookies


def test_a_session_cookie_is_not_replayed(make: Make) -> None:
    """Set-Cookie belongs to the first client: whoever repeats the key gets the answer, and no session."""

    def view() -> Any:
        session["user"] = "ann"
        return pay()

    shop = make(view)
    first, second = shop.post(), shop.post()
    assert "session=" in first.headers["Set-Cookie"]
    assert "Set-Cookie" not in second.headers
    assert (first.data, second.status_code) == (second.data, 201)
    record = shop.record()
    assert record is not None
    assert record.response is not None
    assert "set-cookie" not in dict(record.response.headers)


def test_what_the_session_adds_to_the_headers_is_replayed(make: Make) -> None:
    """Flask adds ``Vary: Cookie`` when it saves the session, after all hooks: it is one of the headers that replay."""

    def view() -> Any:
        session["user"] = "ann"
        return pay()

    shop = make(view)
    first, second = shop.post(), shop.post()
    assert first.headers["Vary"] == "Cookie"
    assert second.headers.get("Vary") == "Cookie"


def test_a_session_that_cannot_be_saved(make: Make) -> None:
    """The client sees what is stored, or it is not stored: never a 500 now and a 201 for the same key later."""

    def view() -> Any:
        session["cart"] = object()
        return pay()

    shop = make(view)
    first, second = shop.post(), shop.post()
    assert shop.runs == 1
    if replayed(second):
        assert (first.status_code, first.data) == (second.status_code, second.data)
    else:
        assert (first.status_code, second.status_code, shop.state) == (500, 409, "unknown")


def test_a_listener_that_fails_after_the_answer_was_stored(make: Make) -> None:
    """A stored answer is what the client gets, whatever breaks in Flask afterwards."""
    shop = make(pay)

    def stumbles(*_: Any, **__: Any) -> None:
        raise RuntimeError("in a listener")

    with request_finished.connected_to(stumbles, shop.app):
        first = shop.post()
    second = shop.post()
    assert shop.runs == 1
    if replayed(second):
        assert (first.status_code, first.data) == (second.status_code, second.data)
    else:
        assert (first.status_code, second.status_code, shop.state) == (500, 409, "unknown")


# ---------------------------------------------------------------- the store fails


def test_an_answer_that_cannot_be_stored_is_not_sent(make: Make) -> None:
    """503 in the place of the view's 201, which the retry gets once the keeper has stored it."""
    shop = make(pay)
    shop.store.down = {"swap"}
    refused = shop.post()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert b"pay_1" not in refused.data
    shop.store.down = set()
    shop.once.engine.keeper._wake.set()
    until(lambda: shop.state == "completed", "the keeper stores it")
    again = shop.post()
    assert (again.json, replayed(again), shop.runs) == ({"id": "pay_1"}, True, 1)


def test_a_large_answer_that_cannot_be_stored_is_not_sent_either(make: Make) -> None:
    """Its body is known whole when it is stored, so the client gets a clean 503 and not the 201 without its end."""
    shop = make(lambda: ("x" * (MAX_RESPONSE + 1), 201))
    shop.store.down = {"swap"}
    refused = shop.post()
    assert (refused.status_code, refused.content_type) == (503, "application/problem+json")
    shop.store.down = set()
    shop.once.engine.keeper._wake.set()
    until(lambda: shop.state == "completed", "the keeper stores the tombstone")
    assert (shop.post().status_code, shop.runs) == (201, 1)


def test_with_the_store_down_flask_is_not_entered(make: Make) -> None:
    """Not even before_request runs: nothing of the app does."""
    shop = make(pay)
    shop.app.before_request(lambda: shop.calls.append("before"))
    shop.store.down = {"reserve"}
    assert shop.post().status_code == 503
    assert shop.calls == []


# ---------------------------------------------------------------- async views


@pytest.mark.skipif(importlib.util.find_spec("asgiref") is None, reason="flask[async] is not installed (asgiref)")
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_an_async_view(make: Make, how: str) -> None:
    """Flask runs it in a loop of its own: the operation is seen there, and it ends as a sync one does."""
    shop = make()

    async def view() -> Any:
        shop.calls.append("view")
        if how == "raises":
            raise RuntimeError
        return {"key": current().key}, 201

    shop.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    first = shop.post()
    assert first.status_code == (500 if how == "raises" else 201)
    assert shop.state == ("unknown" if how == "raises" else "completed")
    assert first.get_json(silent=True) == (None if how == "raises" else {"key": "k-1"})
