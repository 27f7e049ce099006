"""Who may ask: the scope function runs before any look-up, and its answer decides whose key it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, NotAuthenticated, OnceKey, Policy, Request
from oncekey.core.record import Found, Reservation
from oncekey.errors import ConfigurationError
from oncekey.stores.memory import MemoryStore
from tests.web.apps import Api, World, same

MakeApi = Callable[..., Api]


class Users:
    """A table of tokens, of which some are taken back."""

    def __init__(self) -> None:
        self.tokens = {"t-ann": "ann", "t-bob": "bob"}

    def __call__(self, request: Request) -> str:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise NotAuthenticated("this token is not valid")
        return self.tokens[token]


ANN = {"authorization": "Bearer t-ann"}


async def test_unauthenticated_request_gets_401_before_any_look_up(make_api: MakeApi, world: World) -> None:
    """Who is not authenticated is told so; no key is read, written or run."""

    class Counting(MemoryStore):
        asked = 0

        def reserve(self, batch: Any) -> list[Found]:
            Counting.asked += 1
            return super().reserve(batch)

    api = make_api(scope=Users(), store=Counting())
    answer = await api.post(headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert "this token is not valid" in answer.json()["detail"]
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "idempotency-key" not in answer.headers
    assert (api.runs, Counting.asked) == (0, 0)
    assert (await api.post(headers=ANN)).status_code == 201
    assert Counting.asked == 1


async def test_401_comes_before_400(make_api: MakeApi) -> None:
    """A stranger learns nothing about which keys this API takes."""
    api = make_api(scope=Users())
    assert (await api.post(None)).status_code == 401
    assert (await api.post("x" * 300)).status_code == 401


async def test_a_revoked_user_gets_no_replay(make_api: MakeApi) -> None:
    """Hazard 30: authentication runs before the replay, every time."""
    users = Users()
    api = make_api(scope=users)
    first = await api.post(headers=ANN)
    assert same(first, await api.post(headers=ANN))
    del users.tokens["t-ann"]
    refused = await api.post(headers=ANN)
    assert refused.status_code == 401
    assert first.content not in refused.content
    assert "location" not in refused.headers
    assert api.runs == 1


async def test_key_of_another_tenant_looks_unused(make_api: MakeApi) -> None:
    """I6: the answer for another tenant's key is the answer for a key that was never used."""
    api = make_api(scope=Users())
    await api.post("k-1", headers=ANN)
    taken = await api.post("k-1", headers={"authorization": "Bearer t-bob"})
    free = await api.post("k-2", headers={"authorization": "Bearer t-bob"})
    assert taken.status_code == free.status_code == 201
    assert set(taken.headers) == set(free.headers)
    assert "idempotency-replayed" not in taken.headers


async def test_the_scope_function_may_be_async(make_api: MakeApi, world: World) -> None:
    """A scope that has to ask a database awaits it."""

    async def scope(request: Request) -> str:
        return request.headers["x-user"]

    api = make_api(scope=scope)
    await api.post(headers={"x-user": "ann"})
    assert world.record("k-1", "ann") is not None
    assert (await api.post(headers={"x-user": "bob"})).status_code == 201
    assert api.runs == 2


async def test_the_scope_function_sees_the_request(make_api: MakeApi) -> None:
    """Method, path, headers (repeated ones joined) and the raw scope are there."""
    seen: list[Any] = []

    def scope(request: Request) -> str:
        seen.append((request.method, request.path, request.headers["x-a"], request.raw["type"]))
        return "ann"

    api = make_api(scope=scope)
    headers = [("x-a", "1"), ("X-A", "2"), ("idempotency-key", "k-1")]
    await api.client.post("/payments", headers=headers, json={})
    assert seen == [("POST", "/payments", "1, 2", "http")]


@pytest.mark.parametrize("tenant", ["", "a\x1fb", "a\nb", "x" * 256, None, 7])
async def test_a_tenant_that_cannot_be_one_never_runs(make_api: MakeApi, world: World, tenant: Any) -> None:
    """A scope that is empty, or could be taken for another one, is the app's mistake: refused, nothing run."""
    api = make_api(scope=lambda request: tenant)
    assert (await api.post()).status_code == 500
    assert (api.runs, world.rows()) == (0, 0)


async def test_a_tenant_cannot_name_itself_into_another_ones_endpoint(make_api: MakeApi) -> None:
    """With ``key_per="endpoint"`` scope and route are joined by a character that no scope may contain."""
    seen: list[Reservation] = []

    class Seeing(MemoryStore):
        def reserve(self, batch: Any) -> list[Found]:
            seen.extend(batch)
            return super().reserve(batch)

    api = make_api(scope=lambda request: request.headers["x-user"], policy=Policy(key_per="endpoint"), store=Seeing())
    await api.post(headers={"x-user": "a"})
    await api.post(headers={"x-user": "aPOST /payments"})
    assert len({wanted.scope for wanted in seen}) == 2
    assert all("\x1f" in wanted.scope for wanted in seen)


def test_scope_has_no_default() -> None:
    """Whose keys these are is said by the app, or it does not start."""
    with pytest.raises(TypeError):
        OnceKey("memory://")  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="SINGLE_TENANT"):
        OnceKey("memory://", scope=None)  # type: ignore[arg-type]
    OnceKey("memory://", scope=SINGLE_TENANT).close()


@pytest.fixture
def framework() -> str:
    """It makes no difference here."""
    return "starlette"
