"""SQS: FIFO queues, and the limit of ten attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from oncekey import SINGLE_TENANT, OnceKey, Refused
from oncekey.consumers import Situation
from oncekey.consumers.sqs import SqsConsumer
from oncekey.testing.servers import MotoServer

pytestmark = pytest.mark.consumers


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


@pytest.fixture
def client(moto_server: MotoServer) -> Any:
    settings: dict[str, Any] = {"endpoint_url": moto_server.endpoint, "region_name": "eu-central-1"}
    return boto3.client("sqs", **settings)


def refuse(message: object) -> None:
    raise Refused("no such customer")


def attributes(**given: str) -> dict[str, Any]:
    return {name.replace("_", "-"): {"DataType": "String", "StringValue": text} for name, text in given.items()}


def test_deduplication_id_of_a_fifo_queue_is_the_id_and_its_copy_keeps_it(client: Any, once: OnceKey) -> None:
    fifo = {"FifoQueue": "true"}
    url, dead = (client.create_queue(QueueName=f"{n}.fifo", Attributes=fifo)["QueueUrl"] for n in ("orders", "dead"))
    client.send_message(QueueUrl=url, MessageBody="5", MessageGroupId="acme", MessageDeduplicationId="order-42")
    consumer = SqsConsumer(once, client, url, refuse, dead_letter=dead, wait=1)
    (raw,) = consumer.receive()
    assert consumer.on_message(raw).situation is Situation.REFUSED
    assert not consumer.receive()
    (copy,) = client.receive_message(QueueUrl=dead, MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"])[
        "Messages"
    ]
    assert copy["Attributes"]["MessageGroupId"] == "acme"
    assert consumer._id(copy) == "order-42"


@pytest.mark.parametrize("own", [7, 8, 9, 10])
def test_copy_has_as_many_of_our_attributes_as_fit(client: Any, once: OnceKey, own: int) -> None:
    url, dead = (client.create_queue(QueueName=f"{name}-{own}")["QueueUrl"] for name in ("many", "many-dead"))
    given = attributes(message_id="m-1", **{f"a{number}": "x" for number in range(own - 1)})
    client.send_message(QueueUrl=url, MessageBody="5", MessageAttributes=given)
    consumer = SqsConsumer(once, client, url, refuse, dead_letter=dead, wait=0)
    (raw,) = consumer.receive()
    consumer.on_message(raw)
    copies = client.receive_message(QueueUrl=dead, MessageAttributeNames=["All"]).get("Messages", [])
    if own == 10:
        assert not copies  # it stays in its queue
        return
    found = set(copies[0]["MessageAttributes"])
    ours = ["oncekey-message-id", "oncekey-reason", "oncekey-queue"][: 10 - own]
    assert found == {*given, *ours}
