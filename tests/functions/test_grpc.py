"""The gRPC interceptor, through a real server and a real channel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from oncekey import SINGLE_TENANT, Confirmed, NotAuthenticated, NotExecuted, OnceKey, Refused, current
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.errors import ConfigurationError
from oncekey.functions.grpc import OnceInterceptor
from oncekey.stores.registry import open_store
from tests.encryption.rings import ring

pytestmark = pytest.mark.frameworks

METHOD = "/shop.Payments/Charge"
NAME = "shop.Payments/Charge"


def written(message: Any) -> bytes:
    return json.dumps(message).encode()


class Payments:
    """A servicer whose next answers a test chooses."""

    def __init__(self) -> None:
        self.charged: list[Any] = []
        self.behave: Any = self.plain

    async def plain(self, request: Any, context: Any) -> Any:
        return {"number": len(self.charged)}

    async def charge(self, request: Any, context: Any) -> Any:
        self.charged.append(request)
        return await self.behave(request, context)

    async def refund(self, request: Any, context: Any) -> Any:
        return {"refunded": True}

    async def listing(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield {}


class Shop:
    def __init__(self, once: OnceKey) -> None:
        self.once = once
        self.payments = Payments()

    async def start(self, methods: dict[str, dict[str, Any]], **options: Any) -> None:
        self.server = grpc.aio.server(interceptors=[OnceInterceptor(self.once, methods, **options)])
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods_of = {
            "Charge": unary(self.payments.charge, json.loads, written),
            "Refund": unary(self.payments.refund, json.loads, written),
            "List": stream(self.payments.listing, json.loads, written),
        }
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("shop.Payments", methods_of)])
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def call(self, message: Any, key: str | None = "k-1", *, method: str = METHOD, **more: Any) -> Any:
        """The answer and the trailing metadata."""
        metadata = [*more.pop("metadata", ()), *([("idempotency-key", key)] if key is not None else [])]
        call = self.channel.unary_unary(method, written, json.loads)(message, metadata=metadata, timeout=20, **more)
        return await call, dict(await call.trailing_metadata() or ())

    async def fails(self, message: Any, key: str | None = "k-1", **more: Any) -> Any:
        """The code, the details and the trailing metadata of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(message, key, **more)
        error = raised.value
        return error.code(), error.details(), dict(error.trailing_metadata() or ())

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)
        await self.once.aclose()


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    made = Shop(OnceKey("memory://", scope=SINGLE_TENANT))
    await made.start({METHOD: {}})
    yield made
    await made.close()


async def test_second_call_gets_the_first_answer(shop: Shop) -> None:
    first, _ = await shop.call({"cents": 5})
    second, trailing = await shop.call({"cents": 5})
    assert first == second == {"number": 1}
    assert trailing == {"idempotency-replayed": "true"}
    assert await shop.call({"cents": 5}, '"k-1"') == (second, trailing)  # quoted, as in HTTP


async def test_other_request_with_the_key_is_refused(shop: Shop) -> None:
    await shop.call({"cents": 5})
    code, details, trailing = await shop.fails({"cents": 6})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "may not be reused" in details
    assert trailing["oncekey-problem"] == "mismatch"


async def test_call_without_a_key_or_with_a_bad_one_is_refused(shop: Shop) -> None:
    code, _, trailing = await shop.fails({}, None)
    assert (code, trailing["oncekey-problem"]) == (grpc.StatusCode.INVALID_ARGUMENT, "key-missing")
    code, _, trailing = await shop.fails({}, "a,b")
    assert (code, trailing["oncekey-problem"]) == (grpc.StatusCode.INVALID_ARGUMENT, "key-malformed")
    assert shop.payments.charged == []


async def test_call_in_flight_is_told_when_to_come_back(shop: Shop) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(request: Any, context: Any) -> Any:
        entered.set()
        await release.wait()
        return {"slow": True}

    shop.payments.behave = slow
    first = asyncio.create_task(shop.call({}))
    await entered.wait()
    code, _, trailing = await shop.fails({})
    assert code is grpc.StatusCode.ABORTED
    assert trailing == {"oncekey-problem": "in-flight", "grpc-retry-pushback-ms": "1000"}
    release.set()
    assert (await first)[0] == {"slow": True}


async def test_handler_goes_on_when_its_client_has_left(shop: Shop) -> None:
    entered, left, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(request: Any, context: Any) -> Any:
        context.add_done_callback(lambda _: left.set())  # the server has seen that the client is gone
        entered.set()
        await release.wait()
        return {"slow": True}

    shop.payments.behave = slow
    first = asyncio.create_task(shop.call({}))
    await entered.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.wait_for(left.wait(), 20)
    await asyncio.sleep(0)
    release.set()
    await shop.once.drain(20)
    assert (await shop.call({}))[0] == {"slow": True}
    assert len(shop.payments.charged) == 1


async def test_exception_makes_the_key_unknown(shop: Shop) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise TimeoutError

    shop.payments.behave = fail
    code, _, _ = await shop.fails({})
    assert code is grpc.StatusCode.UNKNOWN
    code, details, trailing = await shop.fails({})
    assert (code, trailing["oncekey-problem"]) == (grpc.StatusCode.FAILED_PRECONDITION, "outcome-unknown")
    assert "Keep the key" in details
    assert len(shop.payments.charged) == 1


@pytest.mark.parametrize("returns", [False, True], ids=["abort", "set_code"])
async def test_final_status_of_the_handler_is_stored_and_sent_again(shop: Shop, returns: bool) -> None:
    async def refuse(request: Any, context: Any) -> Any:
        if returns:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("no such card: naïve")
        else:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such card: naïve")
        return {}

    shop.payments.behave = refuse
    assert (await shop.fails({}))[:2] == (grpc.StatusCode.NOT_FOUND, "no such card: naïve")
    code, details, trailing = await shop.fails({})
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "no such card: naïve")
    assert trailing["idempotency-replayed"] == "true"
    assert len(shop.payments.charged) == 1


async def test_status_of_the_handler_decides_what_a_retry_gets(shop: Shop) -> None:
    codes = [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL]

    async def fail(request: Any, context: Any) -> Any:
        await context.abort(codes.pop(0), "no")

    shop.payments.behave = fail
    assert (await shop.fails({}))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED  # not processed: it may run again
    assert (await shop.fails({}))[0] is grpc.StatusCode.INTERNAL  # it ran, and says nothing about its effects
    assert (await shop.fails({}))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert len(shop.payments.charged) == 2


@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [
        (NotExecuted("no"), grpc.StatusCode.UNAVAILABLE, "not-executed"),
        (Refused("too much"), grpc.StatusCode.INVALID_ARGUMENT, "refused"),
    ],
)
async def test_word_of_the_handler_is_a_status(shop: Shop, error: Exception, code: Any, problem: str) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise error

    shop.payments.behave = fail
    seen, details, trailing = await shop.fails({})
    assert (seen, trailing["oncekey-problem"]) == (code, problem)
    assert problem != "refused" or details.startswith("too much")
    shop.payments.behave = shop.payments.plain
    assert (await shop.call({}))[0] == {"number": 2}


@pytest.mark.parametrize("key", ["new", "reused"])
async def test_exception_of_a_function_inside_is_not_about_the_key_of_the_call(shop: Shop, key: str) -> None:
    """NotExecuted of a function that ran, and KeyReused of one that did not: an ordinary exception of the handler."""

    @shop.once.function("mail", key="order")
    async def mail(order: str, text: str) -> None:
        if text == "a":
            raise NotExecuted("the mail server is down")

    await mail("reused", "first")

    async def mailing(request: Any, context: Any) -> Any:
        await mail(key, "a")

    shop.payments.behave = mailing
    refused = [await shop.fails({"order": 1}) for _ in range(2)]
    assert [code for code, *_ in refused] == [grpc.StatusCode.UNKNOWN, grpc.StatusCode.FAILED_PRECONDITION]
    assert len(shop.payments.charged) == 1


async def test_response_that_cannot_be_written_is_not_run_again(shop: Shop) -> None:
    async def strange(request: Any, context: Any) -> Any:
        return {1, 2}

    shop.payments.behave = strange
    assert (await shop.fails({}))[0] in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    assert (await shop.fails({}))[0] is grpc.StatusCode.DATA_LOSS
    assert len(shop.payments.charged) == 1


async def test_verdict_with_an_error_is_a_status(shop: Shop) -> None:
    async def fail(request: Any, context: Any) -> Any:
        raise TimeoutError

    shop.payments.behave = fail
    await shop.fails({})
    await shop.once.ingest(Confirmed(404, {"why": "no card"}), key="k-1", operation=NAME)
    assert (await shop.fails({}))[0] is grpc.StatusCode.NOT_FOUND


async def test_operation_is_current_and_other_methods_pass(shop: Shop) -> None:
    async def look(request: Any, context: Any) -> Any:
        return {"name": current().name, "peer": context.peer()[:4]}

    shop.payments.behave = look
    assert (await shop.call({}))[0] == {"name": NAME, "peer": "ipv4"}
    assert (await shop.call({}, None, method="/shop.Payments/Refund"))[0] == {"refunded": True}


async def test_tenants_do_not_share_keys() -> None:
    async def tenant(metadata: Any) -> str:
        if "account" not in metadata:
            raise NotAuthenticated("who is calling?")
        return str(metadata["account"])

    with pytest.raises(ConfigurationError, match="say whose keys these are"):
        OnceInterceptor(OnceKey("memory://", scope=lambda request: "a"), {METHOD: {}})
    shop = Shop(OnceKey("memory://", scope=lambda request: "a"))
    await shop.start({METHOD: {"effects": "repeatable"}}, scope=tenant)
    try:
        answers = [(await shop.call({}, metadata=[("account", name)]))[0]["number"] for name in "aba"]
        assert answers == [1, 2, 1]
        code, details, _ = await shop.fails({})
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert details.startswith("who is calling?")
    finally:
        await shop.close()


async def test_key_may_be_optional() -> None:
    shop = Shop(OnceKey("memory://", scope=SINGLE_TENANT))
    await shop.start({METHOD: {}}, required=False)
    try:
        assert [(await shop.call({}, None))[0]["number"] for _ in range(2)] == [1, 2]
    finally:
        await shop.close()


def test_methods_that_cannot_be_protected_are_refused() -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT)
    with pytest.raises(ConfigurationError, match=r"'/package\.Service/Method'"):
        OnceInterceptor(once, {"Charge": {}})
    with pytest.raises(ConfigurationError, match="no such option"):
        OnceInterceptor(once, {METHOD: {"effect": "repeatable"}})


async def test_streaming_method_on_the_list_is_refused() -> None:
    shop = Shop(OnceKey("memory://", scope=SINGLE_TENANT))
    await shop.start({"/shop.Payments/List": {}})
    try:
        call = shop.channel.unary_stream("/shop.Payments/List", written, json.loads)({}, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    finally:
        await shop.close()


async def test_call_with_a_personal_key_is_refused() -> None:
    shop = Shop(OnceKey("memory://", scope=SINGLE_TENANT))
    await shop.start({METHOD: {"pii": "refuse"}})
    code, details, trailing = await shop.fails({}, "ann@example.com")
    await shop.close()
    assert (code, trailing["oncekey-problem"]) == (grpc.StatusCode.INVALID_ARGUMENT, "key-personal")
    assert ("an e-mail address" in details, "ann" in details) == (True, False)
    assert shop.payments.charged == []


async def test_response_that_does_not_open_says_to_ask_again_later(tmp_path: Path) -> None:
    """It was kept, and another process may have its encryption key: that is not the same as a response that is gone."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    first, second = (Shop(OnceKey(url, scope=SINGLE_TENANT, encryption=keyring)) for keyring in (None, ring(2)))
    await first.start({METHOD: {}})
    await first.call({"cents": 5})
    await first.close()
    store = open_store(url)
    Rotation(raw_values(store), ring(1), trust_key=True).run()
    store.close()
    await second.start({METHOD: {}})
    code, details, trailing = await second.fails({"cents": 5})
    await second.close()
    assert (code, trailing) == (grpc.StatusCode.DATA_LOSS, {"idempotency-replayed": "true"})
    assert "its response cannot be read right now. It is not done again: ask again later." in details
    assert second.payments.charged == []
