"""The wrapper for tools of MCP, through a real client session: in memory, and over stdio."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel

from oncekey import SINGLE_TENANT, Confirmed, NotAuthenticated, OnceKey, Refused, current
from oncekey.errors import ConfigurationError
from oncekey.functions.mcp import NOT_RUN, once_tool

pytestmark = pytest.mark.frameworks

INVALID_PARAMS = -32602
KEY = "idempotency-key"


class Receipt(BaseModel):
    number: int
    key: str


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


@pytest.fixture
def server() -> MCPServer:
    return MCPServer("shop")


async def call(server: MCPServer, arguments: dict[str, Any], key: Any = "k-1", tool: str = "charge") -> Any:
    """One call, in a session of its own."""
    refused: MCPError | None = None
    async with Client(server) as client:
        try:
            return await client.call_tool(tool, arguments, meta=cast("Any", {} if key is None else {KEY: key}))
        except MCPError as error:
            refused = error
    raise refused


async def test_second_call_gets_the_first_result(once: OnceKey, server: MCPServer) -> None:
    charged: list[str] = []

    @server.tool()
    @once_tool(once, "charge")
    async def charge(order: str, cents: int = 5) -> Receipt:
        """Charge an order."""
        charged.append(order)
        return Receipt(number=len(charged), key=current().key)

    async with Client(server) as client:
        [tool] = (await client.list_tools()).tools
    assert (tool.name, tool.description) == ("charge", "Charge an order.")
    assert sorted(tool.input_schema["properties"]) == ["cents", "order"]
    first, second = await call(server, {"order": "a"}), await call(server, {"order": "a", "cents": 5})
    assert first.structured_content == second.structured_content == {"number": 1, "key": "k-1"}
    assert (await call(server, {"order": "a"}, "k-2")).structured_content == {"number": 2, "key": "k-2"}


async def test_sync_tool_with_a_context_runs_once(once: OnceKey, server: MCPServer) -> None:
    charged: list[str] = []

    @server.tool()
    @once_tool(once, "charge")
    def charge(order: str, ctx: Context) -> str:
        charged.append(order)
        return f"{order} {len(charged)} {bool(ctx.request_id)}"

    results = [(await call(server, {"order": "a"})).content for _ in range(2)]
    assert results[0] == results[1]
    assert results[0][0].text == "a 1 True"


async def test_content_blocks_come_back_as_they_were(once: OnceKey, server: MCPServer) -> None:
    @server.tool()
    @once_tool(once, "charge")
    async def charge(order: str) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text="declined")], is_error=True)

    first, second = await call(server, {"order": "a"}), await call(server, {"order": "a"})
    assert first == second
    assert second.is_error


async def test_calls_that_are_not_run_get_an_error_with_a_type(once: OnceKey, server: MCPServer) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    @server.tool()
    @once_tool(once, "charge")
    async def charge(order: str) -> str:
        entered.set()
        await release.wait()
        return order

    async def refused(*args: Any) -> tuple[int, Any]:
        with pytest.raises(MCPError) as raised:
            await call(server, *args)
        assert "oncekey" not in raised.value.message
        return raised.value.code, raised.value.data

    assert await refused({"order": "a"}, None) == (INVALID_PARAMS, {"type": "urn:oncekey:problem:key-missing"})
    assert await refused({"order": "a"}, "") == (INVALID_PARAMS, {"type": "urn:oncekey:problem:key-malformed"})
    first = asyncio.create_task(call(server, {"order": "a"}))
    await entered.wait()
    assert await refused({"order": "a"}) == (NOT_RUN, {"type": "urn:oncekey:problem:in-flight", "retryAfter": 1.0})
    assert await refused({"order": "b"}) == (INVALID_PARAMS, {"type": "urn:oncekey:problem:mismatch"})
    release.set()
    assert (await first).content == (await call(server, {"order": "a"})).content


async def test_exception_of_a_tool_decides_by_effects(once: OnceKey, server: MCPServer) -> None:
    runs: list[str] = []

    @server.tool()
    @once_tool(once, "charge")
    async def charge(order: str) -> dict[str, int]:
        runs.append(order)
        if order == "refused":
            raise Refused("too much")
        raise TimeoutError

    assert (await call(server, {"order": "a"})).is_error
    with pytest.raises(MCPError) as raised:
        await call(server, {"order": "a"})
    assert raised.value.data["type"] == "urn:oncekey:problem:outcome-unknown"
    await once.ingest(Confirmed(200, {"id": 7}), key="k-1", operation="charge")
    assert (await call(server, {"order": "a"})).structured_content == {"id": 7}
    for _ in range(2):
        with pytest.raises(MCPError, match="too much") as raised:
            await call(server, {"order": "refused"}, "k-2")
        assert raised.value.code == INVALID_PARAMS
    assert runs == ["a", "refused", "refused"]


async def test_error_of_a_function_inside_is_not_about_the_key_of_the_call(once: OnceKey, server: MCPServer) -> None:
    @once.function("mail", key="order", effects="repeatable")
    def mail(order: str) -> None:
        current().downstream_key("mail")
        raise Refused("no such parcel")

    with pytest.raises(Refused):
        mail("a")

    @server.tool()
    @once_tool(once, "charge", effects="repeatable")
    async def charge(order: str) -> None:
        mail(order)

    failed = await call(server, {"order": "a"})
    assert failed.is_error  # the tool's own error, and not a refusal of oncekey's


async def test_tool_goes_on_when_its_client_gives_up(once: OnceKey, server: MCPServer) -> None:
    entered, release, runs = asyncio.Event(), asyncio.Event(), []

    @server.tool()
    @once_tool(once, "charge")
    async def charge(order: str) -> str:
        runs.append(order)
        entered.set()
        await release.wait()
        return "charged"

    first = asyncio.create_task(call(server, {"order": "a"}))
    await entered.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    release.set()
    await once.drain(20)
    assert (await call(server, {"order": "a"})).content[0].text == "charged"
    assert runs == ["a"]


async def test_tenants_do_not_share_keys(server: MCPServer) -> None:
    with OnceKey("memory://", scope=lambda request: "never asked") as once:
        with pytest.raises(ConfigurationError, match="say whose keys these are"):
            once_tool(once, "charge")
        tenants = ["a", "b", "a", ""]

        def tenant(ctx: Context) -> str:
            if not (name := tenants.pop(0)):
                raise NotAuthenticated("who is calling?")
            return name

        charged: list[str] = []

        @server.tool()
        @once_tool(once, "charge", scope=tenant)
        async def charge(order: str) -> int:
            charged.append(current().scope)
            return len(charged)

        numbers = [(await call(server, {"order": "x"})).structured_content["result"] for _ in range(3)]
        assert numbers == [1, 2, 1]
        assert charged == ["a", "b"]
        with pytest.raises(MCPError, match="who is calling"):
            await call(server, {"order": "x"})


async def test_key_may_be_optional(once: OnceKey, server: MCPServer) -> None:
    runs: list[str] = []

    @server.tool()
    @once_tool(once, "charge", required=False)
    async def charge(order: str) -> int:
        runs.append(order)
        return len(runs)

    for _ in range(2):
        await call(server, {"order": "a"}, None)
    assert runs == ["a", "a"]


PROGRAM = """
import sys
from mcp.server.mcpserver import MCPServer
from oncekey import SINGLE_TENANT, OnceKey
from oncekey.functions.mcp import once_tool

server, once = MCPServer("shop"), OnceKey(sys.argv[1], scope=SINGLE_TENANT)

@server.tool()
@once_tool(once, "charge")
def charge(order: str) -> int:
    with open(sys.argv[2], "a") as ledger:
        ledger.write(order + "\\n")
    return len(open(sys.argv[2]).readlines())

server.run("stdio")
"""


async def test_key_counts_across_servers_over_stdio(tmp_path: Path) -> None:
    """A host starts its server again, and repeats the call."""
    program, ledger = tmp_path / "shop.py", tmp_path / "ledger"
    program.write_text(PROGRAM)
    arguments = [str(program), f"sqlite:///{tmp_path / 'keys.db'}", str(ledger)]
    results = []
    for _ in range(2):
        parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
        async with Client(stdio_client(parameters)) as client:
            answer = await client.call_tool("charge", {"order": "a"}, meta=cast("Any", {KEY: "k-1"}))
            results.append(answer.structured_content)
    assert results == [{"result": 1}] * 2
    assert ledger.read_text() == "a\n"


@pytest.mark.parametrize("is_async", [False, True])
async def test_call_with_a_personal_key_is_refused(once: OnceKey, server: MCPServer, is_async: bool) -> None:
    def charge(order: str) -> str:
        pytest.fail("it ran")

    async def charge_async(order: str) -> str:
        return charge(order)

    server.tool("charge")(once_tool(once, "charge", pii="refuse")(cast("Any", charge_async if is_async else charge)))
    with pytest.raises(MCPError) as raised:
        await call(server, {"order": "a"}, "ann@example.com")
    assert (raised.value.code, raised.value.data) == (INVALID_PARAMS, {"type": "urn:oncekey:problem:key-personal"})
    assert "ann" not in raised.value.message
