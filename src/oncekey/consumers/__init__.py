"""Consumers of queues: a message is handled once, however often its broker delivers it.

``once.message(queue, message_id, body)`` is one delivery, for a loop of your own. There is an adapter per client
library, which also answers the broker: ``rabbitmq`` (aio-pika), ``nats`` (nats-py, JetStream), ``kafka`` (aiokafka),
``confluent`` (confluent-kafka), ``sqs`` (boto3), ``redis_streams`` (redis-py). An adapter is one file here, and nothing
else names it. ``table.py`` has every outcome, and the answer to the broker. docs/consumers.md is the how-to.
"""

from __future__ import annotations

from oncekey.consumers.blocking import BlockingConsumer
from oncekey.consumers.consumer import Consumer
from oncekey.consumers.event_loop import AsyncConsumer
from oncekey.consumers.message import Message, Queue
from oncekey.consumers.table import TABLE, Action, OnUnknown, Outcome, Situation
from oncekey.errors import MessageNotRun

__all__ = [
    "TABLE",
    "Action",
    "AsyncConsumer",
    "BlockingConsumer",
    "Consumer",
    "Message",
    "MessageNotRun",
    "OnUnknown",
    "Outcome",
    "Queue",
    "Situation",
]
