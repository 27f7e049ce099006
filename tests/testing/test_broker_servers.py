"""RabbitMQ and NATS as test servers: they come back after a kill, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey.testing.servers import NatsServer, RabbitServer, ServerUnavailable, binaries
from tests.running import running
from tests.testing.test_servers import alive

pytestmark = [pytest.mark.consumers, pytest.mark.timeout(400)]


@pytest.fixture
def rabbit() -> Iterator[RabbitServer]:
    with running(RabbitServer()) as server:
        yield server


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    with running(NatsServer()) as server:
        yield server


async def test_rabbitmq_is_killed_and_started_again_and_leaves_nothing(rabbit: RabbitServer) -> None:
    import aio_pika

    port, pid = rabbit.port, rabbit.pid
    rabbit.kill()
    assert not alive(pid)
    rabbit.start()
    assert rabbit.port == port
    async with await aio_pika.connect(rabbit.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("new", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"1"), routing_key="new")
        found = await queue.get(timeout=60)
        assert found is not None
        assert found.body == b"1"
    assert rabbit._epmd is not None
    pids, home = [rabbit.pid, rabbit._epmd.pid], rabbit._home
    rabbit.stop()
    assert not any(alive(each) for each in pids)
    assert not home.exists()


async def test_nats_keeps_a_stream_through_a_kill_and_leaves_nothing(nats: NatsServer) -> None:
    import nats as library

    async with await library.connect(nats.url) as client:
        js = client.jetstream()
        await js.add_stream(name="kept", subjects=["kept"])
        await js.publish("kept", b"1")
    nats.kill()
    nats.start()
    async with await library.connect(nats.url) as client:
        assert (await client.jetstream().get_msg("kept", 1)).data == b"1"
    pid, home = nats.pid, nats._home
    nats.stop()
    assert not alive(pid)
    assert not home.exists()


@pytest.mark.parametrize("find", [binaries.find_rabbitmq, binaries.find_nats])
def test_server_that_cannot_be_found_says_what_to_do(
    find: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEKEY_SERVERS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "rabbitmq_home", lambda root: None)
    with pytest.raises(ServerUnavailable, match="run `make servers`"):
        find()  # type: ignore[operator]  # one of two functions
