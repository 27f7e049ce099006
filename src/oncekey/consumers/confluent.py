"""Kafka, with confluent-kafka. ::

    settings = {"bootstrap.servers": "…", "group.id": "billing", "auto.offset.reset": "earliest"}
    ConfluentConsumer(once, settings, ["payments"], charge, dead_letter="payments.dead").run()

It makes the client itself, from your settings and ``enable.auto.commit=False``: with automatic commits, a crash would
lose messages that are not handled yet. The id is the header ``message-id``, which the producer sets.
``message_id=position`` takes topic, partition and offset instead: then a message that its producer sent twice counts as
two.

It handles one message at a time; start more processes for more. A message that is to be delivered again later stops its
partition until then (see :mod:`oncekey.consumers.kafka`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from oncekey.consumers.blocking import BlockingConsumer
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

_log = logging.getLogger("oncekey")

ID_HEADER: Final = "message-id"
_POLL_SECONDS: Final = 0.5
_FLUSH_SECONDS: Final = 30.0
_OF_THE_CLIENT: Final = frozenset({"bootstrap.servers", "client.id", "debug", "log_level"})
_OF_THE_SECURITY: Final = ("sasl.", "ssl.", "security.")


def position(raw: Message) -> str:
    """Topic, partition and offset: the same at every delivery, and new if the producer sends the message again."""
    return f"{raw.topic()}:{raw.partition()}:{raw.offset()}"


class ConfluentConsumer(BlockingConsumer[Message]):
    """Consumes topics. ``settings`` are the client's; ``options`` those of :class:`oncekey.consumers.Consumer`."""

    holds = (
        False  # Kafka counts no deliveries, and a consumer that is not polled for max.poll.interval.ms loses its turn
    )
    id_hint = (
        'Set the header when you send: producer.produce(topic, body, headers={"message-id": …}); or pass '
        "message_id=position, of oncekey.consumers.confluent"
    )

    def __init__(
        self,
        once: OnceKey,
        settings: Mapping[str, Any],
        topics: Sequence[str],
        handler: Callable[[Message], Any],
        **options: Any,
    ) -> None:
        super().__init__(once, handler, **options)
        if isinstance(topics, str):
            raise ConfigurationError("ConfluentConsumer(topics=…): it takes a list of topics, not one string")
        if not isinstance(settings, Mapping):
            raise ConfigurationError(
                'ConfluentConsumer(settings=…): it takes a dict, such as {"bootstrap.servers": …, "group.id": …}'
            )
        if "group.id" not in settings:
            raise ConfigurationError('ConfluentConsumer(settings=…) needs "group.id": a group has offsets to commit')
        if settings.get("enable.auto.commit"):
            raise ConfigurationError(
                'ConfluentConsumer(settings=…): leave "enable.auto.commit" out. The client would commit the offsets of '
                "messages that are not handled yet, and a crash would lose them"
            )
        self.topics = list(topics)
        self.group = str(settings["group.id"])
        self._consumer_settings = {**settings, "enable.auto.commit": False}
        self._producer_settings = {
            name: setting
            for name, setting in settings.items()
            if name in _OF_THE_CLIENT or name.startswith(_OF_THE_SECURITY)
        }
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._paused: dict[tuple[str, int], float] = {}

    @property
    def consumer(self) -> Consumer:
        """confluent-kafka's consumer. It is made at the first use, so that an app may fork before."""
        if self._consumer is None:
            self._consumer = Consumer(self._consumer_settings)
        return self._consumer

    def consume(self) -> None:
        """Consume until :meth:`stop`, and leave the group."""
        self.consumer.subscribe(self.topics, on_revoke=self._revoked)
        try:
            while not self._stopping.is_set():
                self._resume_due()
                raw = self.consumer.poll(_POLL_SECONDS)
                if raw is None:
                    continue
                if (error := raw.error()) is not None:
                    self._failed(error)
                    continue
                self.on_message(raw)
        finally:
            self.consumer.close()
            self._consumer = None

    @staticmethod
    def _failed(error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        _log.warning("Kafka: %s. The client goes on trying", error.str())

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        del consumer
        for each in partitions:
            self._paused.pop((each.topic, each.partition), None)

    def _resume_due(self) -> None:
        now = time.monotonic()
        for (topic, partition), until in list(self._paused.items()):
            if until <= now:
                del self._paused[topic, partition]
                self.consumer.resume([TopicPartition(topic, partition)])

    def queue_of(self, raw: Message) -> str:
        return f"{raw.topic()}/{self.group}"

    def id_of(self, raw: Message) -> object:
        return self.header_of(raw, ID_HEADER)

    def header_of(self, raw: Message, name: str) -> str | None:
        found = next((content for given, content in _headers(raw) if given == name), None)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found

    def body_of(self, raw: Message) -> bytes:
        body: Any = raw.value()
        return body or b""

    def ack(self, raw: Message) -> None:
        try:
            self.consumer.commit(message=raw, asynchronous=False)
        except KafkaException as error:
            _log.warning(
                "the offset of a handled message of %s was not committed (%s): it is delivered again, and does not run "
                "again",
                self.queue_of(raw),
                error,
            )

    def retry(self, raw: Message, delay: float) -> None:
        """Go back to this message, and fetch nothing from its partition until ``delay`` is over."""
        topic, partition = str(raw.topic()), int(raw.partition() or 0)
        try:
            self.consumer.pause([TopicPartition(topic, partition)])
            self.consumer.seek(TopicPartition(topic, partition, int(raw.offset() or 0)))
        except KafkaException as error:
            _log.warning("partition %s-%d is no longer assigned to this consumer (%s)", topic, partition, error)
            return
        self._paused[topic, partition] = time.monotonic() + delay

    def copy(self, raw: Message, place: str, headers: dict[str, str]) -> None:
        if self._producer is None:
            self._producer = Producer({**self._producer_settings, "enable.idempotence": True})
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed.append(error)

        own = [(name, content) for name, content in _headers(raw) if name not in headers]
        ours = [(name, text.encode()) for name, text in headers.items()]
        self._producer.produce(place, raw.value(), key=raw.key(), headers=[*own, *ours], on_delivery=delivered)
        if self._producer.flush(_FLUSH_SECONDS):
            raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT))
        if failed:
            raise KafkaException(failed[0])


def _headers(raw: Message) -> list[tuple[str, Any]]:
    headers: Any = raw.headers()
    return headers or []
