"""``Policy(bind=…)``: the key of one user is a mismatch for the others of its tenant, and its status is a 404."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oncekey import NotAuthenticated, OnceKey, Policy
from oncekey.core.binding import binding_of
from oncekey.errors import ConfigurationError
from oncekey.stores.registry import open_store
from oncekey.testing.http.stack import PAYMENT, Stack
from tests.web.status_questions import status_of

SECRET, NEW = "s" * 32, "n" * 32
on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])


def user_of(request: Any) -> str:
    try:
        user: str = request.headers["x-user"]
    except KeyError:
        raise NotAuthenticated("no user") from None
    return user


async def user_of_async(request: Any) -> str:
    return user_of(request)


BOUND = Policy(bind=user_of)


@pytest.fixture
def make(make_stack: Any, name: str) -> Callable[..., Stack]:
    def made(policy: Policy = BOUND, **options: Any) -> Stack:
        options = {"bind_secret": SECRET, "scope": lambda request: "acme", **options}
        stack: Stack = make_stack(name, policy=policy, **options)
        return stack

    return made


def ask(stack: Stack, user: str | None = "ann", **more: Any) -> httpx.Response:
    return stack.post(headers={} if user is None else {"X-User": user}, **more)


def status(stack: Stack, user: str | None, key: str = "k-1") -> httpx.Response:
    return status_of(stack, key, {} if user is None else {"X-User": user})


def test_key_of_another_user_is_a_mismatch_and_does_not_run(make: Callable[..., Stack]) -> None:
    """In every framework, with the very same request."""
    stack = make()
    first, other, again = ask(stack), ask(stack, "bob"), ask(stack)
    assert (first.status_code, other.status_code, stack.runs) == (201, 422, 1)
    assert other.json()["type"] == "urn:oncekey:problem:mismatch"
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")


@on_both
def test_status_of_another_users_key_is_404(make: Callable[..., Stack]) -> None:
    stack = make()
    ask(stack)
    assert status(stack, "ann").status_code == 201
    others = [status(stack, "bob"), status(stack, None), status(stack, "ann", "k-2")]
    assert [answer.status_code for answer in others] == [404] * 3
    assert len({answer.content for answer in others}) == 1
    assert "idempotency-key" not in others[0].headers


@on_both
@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
def test_refusal_is_that_of_a_mismatch_in_each_profile(make: Callable[..., Stack], profile: str) -> None:
    stack = make(profile=profile)
    ask(stack)
    bob, other = ask(stack, "bob"), ask(stack, body={"amount": 1})
    assert bob.status_code == other.status_code == (400 if profile == "stripe" else 422)
    if profile != "governance":  # it has an id of its own
        assert bob.content == other.content
    for answer in (bob, other):
        assert "another caller (user, client or device), or with a different request" in answer.text
        for word in ("body or precondition", "ann", "bob"):
            assert word not in answer.text


@on_both
def test_retry_of_a_failed_request_is_bound_too(make: Callable[..., Stack]) -> None:
    stack = make(Policy(bind=user_of, effects="repeatable"))
    assert ask(stack, m="return-500").status_code == 500
    assert ask(stack, "bob", m="return-500").status_code == 422
    assert stack.runs == 1
    ask(stack, m="return-500")
    assert stack.runs == 2


@on_both
def test_row_keeps_a_keyed_hash_that_names_nobody(make: Callable[..., Stack]) -> None:
    stack = make()
    ask(stack)
    stack.post("k-2", headers={"X-User": "ann"})
    rows = stack.store.listing()
    hashes = {binding_of(row.fingerprint_recipe) for row in rows}
    assert len(hashes) == 2
    assert None not in hashes
    assert not any("ann" in str(row) for row in rows)


@on_both
def test_caller_without_a_binding_gets_401_and_leaves_no_row(make: Callable[..., Stack]) -> None:
    stack = make()
    assert ask(stack, None).status_code == 401
    assert (stack.store.listing(), stack.runs) == ([], 0)


@on_both
@pytest.mark.parametrize("wrong", [None, "", 7, b"ann"])
def test_bind_that_returns_no_text_is_an_error_of_the_app(make: Callable[..., Stack], wrong: Any) -> None:
    stack = make(Policy(bind=lambda request: wrong))
    assert (ask(stack).status_code, stack.runs, stack.store.listing()) == (500, 0, [])


@pytest.mark.parametrize("name", ["asgi", "django-async", "django-drf-asgi"])
def test_async_bind_is_awaited(make: Callable[..., Stack]) -> None:
    stack = make(Policy(bind=user_of_async))
    assert [ask(stack, user).status_code for user in ("ann", "bob", "ann")] == [201, 422, 201]
    assert (status(stack, "ann").status_code, status(stack, "bob").status_code) == (201, 404)


@pytest.mark.parametrize("name", ["wsgi"])
def test_async_bind_of_a_wsgi_app_is_an_error(make: Callable[..., Stack]) -> None:
    assert ask(make(Policy(bind=user_of_async))).status_code == 500


@pytest.mark.parametrize("name", ["asgi"])
def test_binding_is_kept_by_every_store(make: Callable[..., Stack], store_url: str) -> None:
    store = open_store(store_url)
    store.migrate()
    stack = make(store=store)
    answers = [ask(stack, user).status_code for user in ("ann", "bob", "ann")]
    assert (answers, stack.runs) == ([201, 422, 201], 1)
    assert (status(stack, "ann").status_code, status(stack, "bob").status_code) == (201, 404)


# -- deploys -----------------------------------------------------------------------------------------------------------


@on_both
def test_secret_can_be_replaced(make: Callable[..., Stack]) -> None:
    old = make()
    ask(old)
    new = make(store=old.store, bind_secret=[NEW, SECRET])
    assert ask(new).headers["idempotency-replayed"] == "true"
    assert ask(new, "bob").status_code == 422
    assert status(new, "ann").status_code == 201
    new.post("k-2", headers={"X-User": "ann"})
    assert make(store=old.store, bind_secret=NEW).post("k-2", headers={"X-User": "ann"}).status_code == 201
    assert ask(make(store=old.store, bind_secret=NEW)).status_code == 422


@on_both
def test_key_of_before_the_binding_is_still_answered(make: Callable[..., Stack]) -> None:
    """As with every other change of a policy: an identical retry stays identical."""
    before = make(Policy())
    ask(before)
    assert ask(make(store=before.store)).headers["idempotency-replayed"] == "true"


@on_both
def test_bound_key_is_refused_when_the_route_is_no_longer_bound(make: Callable[..., Stack]) -> None:
    """No one can tell then whose it is."""
    before = make()
    ask(before)
    after = make(Policy(), store=before.store)
    assert (ask(after).status_code, status(after, "ann").status_code, after.runs) == (422, 404, 0)
    assert "another caller" in ask(after).text


@on_both
def test_bound_key_is_compared_by_the_recipe_of_its_row(make: Callable[..., Stack]) -> None:
    before = make(Policy(bind=user_of, fingerprint_fields=("amount",)))
    ask(before)
    after = make(Policy(bind=user_of, fingerprint_headers=()), store=before.store)
    assert ask(after, body=PAYMENT | {"note": "x"}).headers["idempotency-replayed"] == "true"
    assert ask(after, "bob").status_code == 422


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, "short", "", [], [SECRET, "short"]])
def test_binding_needs_a_secret(secret: Any) -> None:
    with pytest.raises(ConfigurationError, match="bind_secret"):
        OnceKey("memory://", scope=lambda request: "acme", policy=BOUND, bind_secret=secret)


def test_bind_takes_a_function() -> None:
    with pytest.raises(ConfigurationError, match="function of the request"):
        Policy(bind="user")  # type: ignore[arg-type]
