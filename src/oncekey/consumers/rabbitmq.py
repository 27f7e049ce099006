"""RabbitMQ, with aio-pika. ::

    queue = await channel.declare_queue("payments", durable=True)
    await channel.declare_queue("payments.dead", durable=True)
    await RabbitConsumer(once, queue, charge, dead_letter="payments.dead").run()

The id is the property ``message_id``, which the producer sets. (aio-pika makes a random one for a message that is
published without: then a message that is published twice counts as two.) Copies go through the default exchange to the
queue that ``dead_letter`` names, and the broker confirms each one before the message is acknowledged.

RabbitMQ has no delay of its own: a message that is to be delivered again later stays unacknowledged with this consumer
for that time, and is then requeued. It counts towards the channel's prefetch, so set that to more than ``concurrency``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import aio_pika
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from pamqp.commands import Basic

from oncekey.consumers.consumer import AsyncConsumer, Handler
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError


class RabbitConsumer(AsyncConsumer[AbstractIncomingMessage]):
    """Consumes one queue. ``settings`` are those of :class:`oncekey.consumers.Consumer` and ``concurrency``."""

    id_hint = (
        "Set message_id when you publish: aio_pika.Message(body, message_id=…); or pass message_id=…, a function of "
        "the message"
    )

    def __init__(
        self, once: OnceKey, queue: AbstractQueue, handler: Handler[AbstractIncomingMessage], **settings: Any
    ) -> None:
        super().__init__(once, handler, **settings)
        if not hasattr(queue, "consume"):
            raise ConfigurationError(
                "RabbitConsumer(queue=…): it takes a queue of aio-pika, such as await channel.declare_queue('payments')"
            )
        self.queue = queue

    async def run(self) -> None:
        """Consume until cancelled."""
        for place in set(self.places.values()):
            await self.queue.channel.get_queue(place)  # raises now, and not when the first message must go there
        tag = await self.queue.consume(self._taken)
        try:
            await self.queue.channel.closed()  # connect_robust opens it again by itself, and this goes on waiting
            raise ConnectionError(f"the channel of queue {self.queue.name} was closed, so it is no longer consumed")
        finally:
            with suppress(Exception):  # a channel that is closed has no consumer to cancel
                await self.queue.cancel(tag)
            await self._drain()

    async def _taken(self, raw: AbstractIncomingMessage) -> None:
        await self._spawn(raw)

    def queue_of(self, raw: AbstractIncomingMessage) -> str:
        del raw
        return self.queue.name

    def id_of(self, raw: AbstractIncomingMessage) -> object:
        return raw.message_id

    def body_of(self, raw: AbstractIncomingMessage) -> bytes:
        return raw.body

    def header_of(self, raw: AbstractIncomingMessage, name: str) -> str | None:
        found = raw.headers.get(name)
        return None if found is None else str(found)

    def content_type_of(self, raw: AbstractIncomingMessage) -> str | None:
        return raw.content_type

    def is_answered(self, raw: AbstractIncomingMessage) -> bool:
        return raw.processed

    async def ack(self, raw: AbstractIncomingMessage) -> None:
        await raw.ack()

    async def retry(self, raw: AbstractIncomingMessage, delay: float) -> None:
        self._later(delay, lambda: raw.nack(requeue=True))

    async def copy(self, raw: AbstractIncomingMessage, place: str, headers: dict[str, str]) -> None:
        message = aio_pika.Message(
            raw.body,
            headers={**raw.headers, **headers},
            message_id=raw.message_id,
            content_type=raw.content_type,
            content_encoding=raw.content_encoding,
            correlation_id=raw.correlation_id,
            priority=raw.priority,
            type=raw.type,
            app_id=raw.app_id,
            timestamp=raw.timestamp,
            reply_to=raw.reply_to,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        said = await self.queue.channel.default_exchange.publish(message, routing_key=place, mandatory=True)
        if not isinstance(said, Basic.Ack):
            raise NotConfirmed(
                f"RabbitMQ did not confirm the copy to queue {place}: the queue must exist, and the channel must have "
                "publisher confirms, as connection.channel() has by default"
            )


class NotConfirmed(RuntimeError):
    """The copy may be lost, so the message is not acknowledged."""
