"""Kafka, with aiokafka. ::

    consumer = AIOKafkaConsumer("payments", group_id="billing", enable_auto_commit=False, bootstrap_servers=…)
    producer = AIOKafkaProducer(bootstrap_servers=…)          # for the dead letters
    await KafkaConsumer(once, consumer, charge, producer=producer, dead_letter="payments.dead").run()

The id is the header ``message-id``, which the producer sets. ``message_id=position`` takes topic, partition and offset
instead: then a message that its producer sent twice counts as two.

A partition is handled in its order, and partitions beside each other. To acknowledge is to commit the offset after the
message. Kafka cannot deliver one message later and the next one now: a message that is to be delivered again stops its
partition until then. With ``unknown="keep"`` that is until its key is settled.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from oncekey.consumers.event_loop import AsyncConsumer, Handler
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

_log = logging.getLogger("oncekey")

ID_HEADER: Final = "message-id"
_POLL_MILLISECONDS: Final = 500
_MOVED_AWAY: Final = (
    "partition %s-%d is no longer assigned to this consumer (%s): the group's other consumer gets its messages again, "
    "and those that were handled do not run again"
)


def position(raw: ConsumerRecord) -> str:
    """Topic, partition and offset: the same at every delivery, and new if the producer sends the message again."""
    return f"{raw.topic}:{raw.partition}:{raw.offset}"


class KafkaConsumer(AsyncConsumer[ConsumerRecord]):
    """Consumes what the aiokafka consumer is subscribed to. ``settings`` are those of
    :class:`oncekey.consumers.Consumer`. All assigned partitions are handled at the same time."""

    holds = (
        False  # Kafka counts no deliveries, and a consumer that is not polled for max_poll_interval_ms loses its turn
    )
    id_hint = (
        'Set the header when you send: producer.send(topic, body, headers=[("message-id", b"…")]); or pass '
        "message_id=position, of oncekey.consumers.kafka"
    )

    def __init__(
        self,
        once: OnceKey,
        consumer: AIOKafkaConsumer,
        handler: Handler[ConsumerRecord],
        *,
        producer: AIOKafkaProducer,
        **settings: Any,
    ) -> None:
        super().__init__(once, handler, **settings)
        if not isinstance(consumer, AIOKafkaConsumer) or not isinstance(producer, AIOKafkaProducer):
            raise ConfigurationError("KafkaConsumer takes an AIOKafkaConsumer, and producer=, an AIOKafkaProducer")
        self.group = consumer._group_id
        if self.group is None:
            raise ConfigurationError("KafkaConsumer needs AIOKafkaConsumer(group_id=…): a group has offsets to commit")
        if consumer._enable_auto_commit:
            raise ConfigurationError(
                "KafkaConsumer needs AIOKafkaConsumer(enable_auto_commit=False): aiokafka would commit the offsets of "
                "messages that are not handled yet, and a crash would lose them"
            )
        self.consumer = consumer
        self.producer = producer
        self._paused: set[TopicPartition] = set()

    async def consume(self) -> None:
        """Consume until cancelled. Start the aiokafka consumer and producer before, and stop them after."""
        try:
            while self._goes_on():
                found = await self.consumer.getmany(timeout_ms=_POLL_MILLISECONDS)
                if found:
                    await asyncio.shield(self._handle(found))
        finally:
            await self._drain()

    def _handle(self, found: dict[TopicPartition, list[ConsumerRecord]]) -> asyncio.Task[Any]:
        async def all_partitions() -> None:
            await asyncio.gather(*(self._partition(at, records) for at, records in found.items()))

        task = asyncio.create_task(all_partitions())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)  # run() raises what it raises
        return task

    async def _partition(self, at: TopicPartition, records: list[ConsumerRecord]) -> None:
        """Handle messages in their order, up to one that must be delivered again."""
        for raw in records:
            if self._stopping.is_set() or at in self._paused:
                return
            await self.on_message(raw)

    def queue_of(self, raw: ConsumerRecord) -> str:
        return f"{raw.topic}/{self.group}"

    def id_of(self, raw: ConsumerRecord) -> object:
        return self.header_of(raw, ID_HEADER)

    def header_of(self, raw: ConsumerRecord, name: str) -> str | None:
        found = next((content for given, content in raw.headers if given == name), None)
        return None if found is None else found.decode("utf-8", "replace")

    def body_of(self, raw: ConsumerRecord) -> bytes:
        return raw.value or b""

    async def ack(self, raw: ConsumerRecord) -> None:
        at = TopicPartition(raw.topic, raw.partition)
        try:
            await self.consumer.commit({at: raw.offset + 1})
        except (CommitFailedError, IllegalStateError) as error:
            _log.warning(_MOVED_AWAY, at.topic, at.partition, error)

    async def retry(self, raw: ConsumerRecord, delay: float) -> None:
        """Go back to this message, and fetch nothing from its partition until ``delay`` is over."""
        at = TopicPartition(raw.topic, raw.partition)
        try:
            self.consumer.seek(at, raw.offset)
            self.consumer.pause(at)
        except IllegalStateError as error:
            _log.warning(_MOVED_AWAY, at.topic, at.partition, error)
            return
        self._paused.add(at)
        asyncio.get_running_loop().call_later(delay, self._resume, at)

    def _resume(self, at: TopicPartition) -> None:
        self._paused.discard(at)
        with suppress(IllegalStateError):  # the partition is no longer assigned to this consumer
            self.consumer.resume(at)

    async def copy(self, raw: ConsumerRecord, place: str, headers: dict[str, str]) -> None:
        own = [(name, content) for name, content in raw.headers if name not in headers]
        ours = [(name, text.encode()) for name, text in headers.items()]
        await self.producer.send_and_wait(place, raw.value, key=raw.key, headers=[*own, *ours])
