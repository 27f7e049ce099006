"""The gRPC interceptor with messages of protobuf: what a real stub sends, through a real server and a real channel.

The well-known types need no compiler. ``Struct`` has a map, whose entries may come in any order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.functions.grpc import OnceInterceptor

struct_pb2: Any = pytest.importorskip("google.protobuf.struct_pb2", reason="protobuf is not installed")
wrappers_pb2: Any = pytest.importorskip("google.protobuf.wrappers_pb2")

pytestmark = pytest.mark.frameworks

METHOD = "/shop.Payments/Charge"


class Shop:
    """Charges what a Struct says, and answers with a StringValue."""

    def __init__(self) -> None:
        self.once = OnceKey("memory://", scope=SINGLE_TENANT)
        self.charged: list[Any] = []

    async def charge(self, request: Any, context: Any) -> Any:
        self.charged.append(request)
        return wrappers_pb2.StringValue(value=f"receipt {len(self.charged)} for {request['cents']:g} \u20ac")

    async def start(self) -> None:
        self.server = grpc.aio.server(interceptors=[OnceInterceptor(self.once, {METHOD: {}})])
        handler = grpc.unary_unary_rpc_method_handler(
            self.charge, struct_pb2.Struct.FromString, wrappers_pb2.StringValue.SerializeToString
        )
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("shop.Payments", {"Charge": handler})]
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def send(self, data: bytes, key: str = "k-1") -> tuple[Any, dict[str, Any]]:
        """Send these bytes as they are; the answer and the trailing metadata."""
        stub: Any = self.channel.unary_unary(METHOD, None, wrappers_pb2.StringValue.FromString)
        call = stub(data, metadata=[("idempotency-key", key)], timeout=20)
        return await call, dict(await call.trailing_metadata() or ())

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)
        await self.once.aclose()


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    made = Shop()
    await made.start()
    yield made
    await made.close()


def struct(**members: Any) -> Any:
    made = struct_pb2.Struct()
    made.update(members)
    return made


def in_this_order(*names: str, **members: Any) -> bytes:
    """A Struct whose map has its entries in this order: the encodings of its parts, one after the other."""
    return b"".join(struct(**{name: members[name]}).SerializeToString() for name in names)


async def test_repeated_message_gets_the_first_answer(shop: Shop) -> None:
    message = struct(cents=500, order="a-1").SerializeToString()
    first, _ = await shop.send(message)
    again, trailing = await shop.send(message)
    assert first == again == wrappers_pb2.StringValue(value="receipt 1 for 500 \u20ac")
    assert trailing == {"idempotency-replayed": "true"}
    assert [request["order"] for request in shop.charged] == ["a-1"]


async def test_map_in_another_order_is_the_same_message(shop: Shop) -> None:
    members = {"cents": 500, "order": "a-1", "at": {"city": "Ulm", "zip": "89073"}}
    one, other = (in_this_order(*names, **members) for names in (("cents", "order", "at"), ("at", "order", "cents")))
    assert one != other
    first, _ = await shop.send(one)
    again, trailing = await shop.send(other)
    assert (again, trailing, len(shop.charged)) == (first, {"idempotency-replayed": "true"}, 1)


async def test_nested_map_in_another_order_is_the_same_message(shop: Shop) -> None:
    def nested(*names: str) -> bytes:
        inner = in_this_order(*names, city="Ulm", zip="89073")
        value = struct_pb2.Value.FromString(b"\x2a" + bytes([len(inner)]) + inner)  # its field 5, a Struct
        entry = b"\x0a\x02at\x12" + bytes([value.ByteSize()]) + b"\x2a" + bytes([len(inner)]) + inner
        return struct(cents=500).SerializeToString() + b"\x0a" + bytes([len(entry)]) + entry

    one, other = nested("city", "zip"), nested("zip", "city")
    assert one != other
    assert struct_pb2.Struct.FromString(one) == struct_pb2.Struct.FromString(other)
    await shop.send(one)
    assert (await shop.send(other))[1] == {"idempotency-replayed": "true"}
    assert len(shop.charged) == 1


async def test_other_message_with_the_key_is_refused(shop: Shop) -> None:
    await shop.send(struct(cents=500).SerializeToString())
    for other in (struct(cents=501), struct(cents=500, order="a-1")):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await shop.send(other.SerializeToString())
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(shop.charged) == 1


async def test_bytes_that_are_no_message_leave_no_key(shop: Shop) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await shop.send(b"\x0a\xff\xff")
    assert shop.once.store.listing() == []
    await shop.send(struct(cents=500).SerializeToString())
    assert len(shop.charged) == 1
