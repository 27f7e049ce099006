"""Flask: how a view ends decides what becomes of its key, also where its answer is a stream."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Response, abort, make_response, send_file, stream_with_context

from oncekey import NotExecuted, OutcomeUnknown, Refused, current
from tests.web.flask_shop import MakeShop, broken, pay, replayed

# ---------------------------------------------------------------- how a view ends


@pytest.mark.parametrize(
    ("effects", "state"),
    [
        ("external", "unknown"),
        ("transactional", "failed_retryable"),
        ("phased", "failed_retryable"),
        ("repeatable", "failed_retryable"),
    ],
)
def test_view_that_raises_makes_an_external_key_unknown(make_shop: MakeShop, effects: Any, state: str) -> None:
    """It may have charged a card: external effects are in doubt, and all others can be tried again."""
    shop = make_shop(broken, effects=effects)
    assert (shop.post().status_code, shop.state) == (500, state)
    assert shop.post().status_code == (409 if state == "unknown" else 500)
    assert shop.runs == (1 if state == "unknown" else 2)


@pytest.mark.parametrize(
    ("effects", "state"),
    [
        ("external", "unknown"),
        ("transactional", "failed_retryable"),
        ("phased", "failed_retryable"),
        ("repeatable", "failed_retryable"),
    ],
)
def test_view_that_returns_500_follows_the_effects(make_shop: MakeShop, effects: Any, state: str) -> None:
    """A 5xx says nothing about what was done before it."""
    shop = make_shop(lambda: ({"error": "no"}, 500), effects=effects)
    first = shop.post()
    assert (first.status_code, first.json, shop.state) == (500, {"error": "no"}, state)
    assert shop.post().status_code == (409 if state == "unknown" else 500)
    assert shop.runs == (1 if state == "unknown" else 2)


@pytest.mark.parametrize("effects", ["external", "transactional", "phased", "repeatable"])
@pytest.mark.parametrize(
    ("status", "state"), [(400, "failed"), (401, "failed"), (404, "failed"), (409, "failed"), (429, "failed_retryable")]
)
def test_a_view_that_aborts_with_4xx(make_shop: MakeShop, effects: Any, status: int, state: str) -> None:
    """A 4xx is the answer to this request, raised or returned, and final, unless it means "not processed"."""
    shop = make_shop(lambda: abort(status), effects=effects)
    first = shop.post()
    assert (first.status_code, shop.state) == (status, state)
    second = shop.post()
    assert second.status_code == status
    assert second.data == first.data
    assert replayed(second) == (state == "failed")
    assert shop.runs == (1 if state == "failed" else 2)


def test_a_view_that_aborts_with_503_has_raised(make_shop: MakeShop) -> None:
    """An HTTP exception is an exception: an external effect may have happened before it."""
    shop = make_shop(lambda: abort(503))
    assert (shop.post().status_code, shop.state) == (503, "unknown")


def test_a_view_that_aborts_with_a_response_of_its_own(make_shop: MakeShop) -> None:
    """``abort(response)`` is raised as well, and what is stored is that response."""
    shop = make_shop(lambda: abort(make_response({"error": "gone"}, 410)))
    first, second = shop.post(), shop.post()
    assert (first.status_code, first.json, second.json) == (410, {"error": "gone"}, {"error": "gone"})
    assert (shop.runs, replayed(second)) == (1, True)


def test_view_that_returns_nothing_counts_as_raised(make_shop: MakeShop) -> None:
    """Flask makes a 500 of a forgotten ``return``, after the view has done its work: it counts as raised."""
    shop = make_shop(lambda: None)
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
    make_shop: MakeShop, error: Exception, status: int, state: str | None, testing: bool
) -> None:
    """Our exceptions are answered by us, also while testing, and end the attempt as they say."""

    def view() -> Any:
        raise error

    shop = make_shop(view, testing=testing)
    answer = shop.post()
    assert (answer.status_code, shop.state) == (status, state)
    assert answer.content_type == "application/problem+json"
    assert answer.headers["Idempotency-Key"] == "k-1"


def test_ours_raised_in_before_request(make_shop: MakeShop) -> None:
    """A hook that looks at every request may refuse it, before the view, with the key unused."""
    shop = make_shop(pay)

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


def test_a_view_that_streams_a_little(make_shop: MakeShop) -> None:
    """A small stream is stored whole before the client sees it, and replayed."""
    shop = make_shop(streaming("one,", "two"))
    first, second = shop.post(), shop.post()
    assert first.text == second.text == "one,two"
    assert first.headers["Content-Length"] == second.headers["Content-Length"] == "7"
    assert (shop.runs, shop.state, replayed(second)) == (1, "completed", True)


def test_a_view_that_streams_a_lot(make_shop: MakeShop) -> None:
    """A large one passes through and leaves a tombstone."""
    shop = make_shop(streaming(*["x" * 1000] * 10))
    first, second = shop.post(), shop.post()
    assert first.text == "x" * 10_000
    assert "body-not-kept" in second.text
    assert (shop.runs, shop.state, replayed(second)) == (1, "completed", True)


@pytest.mark.parametrize("pieces", [("one",), ("x" * 1000,) * 10], ids=["small", "large"])
def test_a_stream_that_breaks_midway(make_shop: MakeShop, pieces: tuple[str, ...]) -> None:
    """The view has returned, but its response has not ended: that is no success to store."""
    shop = make_shop(streaming(*pieces, fails=True))
    with pytest.raises(RuntimeError, match="broke midway"):
        shop.post()
    assert shop.state == "unknown"
    assert shop.post().status_code == 409


@pytest.mark.parametrize(("effects", "state"), [("external", "unknown"), ("repeatable", "failed_retryable")])
def test_streamed_500_follows_the_effects(make_shop: MakeShop, effects: Any, state: str) -> None:
    shop = make_shop(lambda: Response(iter(["no"]), 500), effects=effects)
    assert (shop.post().status_code, shop.state) == (500, state)


def test_send_file_is_stored_with_its_headers(make_shop: MakeShop, tmp_path: Any) -> None:
    """``send_file`` is a stream: it is stored with its headers."""
    (tmp_path / "receipt.txt").write_text("paid")
    shop = make_shop(lambda: send_file(tmp_path / "receipt.txt", as_attachment=True))
    first, second = shop.post(), shop.post()
    assert first.data == second.data == b"paid"
    assert first.headers["Content-Disposition"] == second.headers["Content-Disposition"]
    assert first.headers["ETag"] == second.headers["ETag"]
    assert (shop.runs, replayed(second)) == (1, True)


# ---------------------------------------------------------------- async views


@pytest.mark.skipif(importlib.util.find_spec("asgiref") is None, reason="flask[async] is not installed (asgiref)")
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_async_view_sees_its_operation(make_shop: MakeShop, how: str) -> None:
    """Flask runs it in a loop of its own: the operation is seen there, and it ends as a sync one does."""
    shop = make_shop()

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
