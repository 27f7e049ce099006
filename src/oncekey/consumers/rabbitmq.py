"""RabbitMQ, with aio-pika. ::

    queue = await channel.declare_queue("payments", durable=True)
    await channel.declare_queue("payments.dead", durable=True)
    await RabbitConsumer(once, queue, charge, dead_letter="payments.dead").run()

The id is the property ``message_id``, which the producer sets. (aio-pika makes a random one for a message that is
published without: then a message that is published twice counts as two.) Copies go through the default exchange to the
queue that ``dead_letter`` names, and the broker confirms each one before the message is acknowledged.

RabbitMQ has no delay of its own: a message that is to be delivered again later stays unacknowledged with this consumer
for that time, and is then requeued. It counts towards the channel's prefetch, so set that to more than ``concurrency``.
A message that would be requeued after its last delivery (``x-delivery-limit``) goes to the dead letters.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from pamqp.commands import Basic

from oncekey.consumers.event_loop import AsyncConsumer, Handler
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

_log = logging.getLogger("oncekey")

_LIMIT: Final = "x-delivery-limit"
_RETURNED: Final = "x-delivery-count"
_UNKNOWN_LIMIT: Final = (
    "queue %s counts deliveries, and this consumer does not know its limit: the broker may drop a message that comes "
    "back too often. Declare the queue with x-delivery-limit, or pass RabbitConsumer(delivery_limit=…), and give the "
    "queue a dead-letter exchange (docs/consumers.md)"
)


class RabbitConsumer(AsyncConsumer[AbstractIncomingMessage]):
    """Consumes one queue. ``settings`` are those of :class:`oncekey.consumers.Consumer` and ``concurrency``.

    ``delivery_limit``: the ``x-delivery-limit`` of a quorum queue, if a policy of the broker sets it, or its version
    (20 since RabbitMQ 4.0). By default what the queue was declared with.
    """

    id_hint = (
        "Set message_id when you publish: aio_pika.Message(body, message_id=…); or pass message_id=…, a function of "
        "the message"
    )

    def __init__(
        self,
        once: OnceKey,
        queue: AbstractQueue,
        handler: Handler[AbstractIncomingMessage],
        *,
        delivery_limit: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(once, handler, **settings)
        if delivery_limit is not None and (type(delivery_limit) is not int or delivery_limit < 1):
            raise ConfigurationError(
                f"RabbitConsumer(delivery_limit={delivery_limit!r}): it takes a whole number from 1, the queue's own "
                "limit, or None"
            )
        if not hasattr(queue, "consume"):
            raise ConfigurationError(
                "RabbitConsumer(queue=…): it takes a queue of aio-pika, such as await channel.declare_queue('payments')"
            )
        self.queue = queue
        declared = (getattr(queue, "arguments", None) or {}).get(_LIMIT)
        self._most: int | None = declared if delivery_limit is None else delivery_limit
        self._told_of_limit = False

    async def consume(self) -> None:
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

    async def limit_reached(self, raw: AbstractIncomingMessage) -> str | None:
        """A quorum queue counts in this header how often the message came back, and drops it above the limit."""
        returned = raw.headers.get(_RETURNED)
        if not isinstance(returned, int):
            return None  # the first delivery, or a classic queue, which has no limit
        if self._most is None:
            if not self._told_of_limit:
                self._told_of_limit = True
                _log.warning(_UNKNOWN_LIMIT, self.queue.name)
            return None
        return f"{_LIMIT}={self._most}" if returned >= self._most else None

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
