"""NATS JetStream, with nats-py. ::

    js = (await nats.connect()).jetstream()
    subscription = await js.pull_subscribe("payments", durable="billing")
    await NatsConsumer(once, js, subscription, charge, dead_letter="dead.payments").run()

The id is the header ``Nats-Msg-Id``, which the producer sets. (JetStream itself drops a second message with that header
only within the stream's duplicate window, two minutes by default.) ``message_id=position`` takes the place in the
stream instead: then a message that its producer published twice counts as two.

While a message is in hand, the consumer tells JetStream so three times per ``ack_wait``: it is not delivered again
meanwhile. If a message would be delivered again after its last delivery (``max_deliver``), it goes to the dead letters.

``dead_letter`` is a subject that a stream keeps. A copy has another ``Nats-Msg-Id``, because JetStream would drop a
copy with the same one from the same stream; the message's own id is in the header ``oncekey-message-id``.
"""

from __future__ import annotations

from typing import Any, Final

from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from oncekey.consumers.event_loop import AsyncConsumer, Handler
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

ID_HEADER: Final = "Nats-Msg-Id"
_FETCH_SECONDS: Final = 5.0
_ACK_WAIT: Final = 30.0
"""JetStream's default."""


def position(raw: Msg) -> str:
    """The id of a message as its stream has it: the same at every delivery, and new if its producer publishes again."""
    return f"{raw.metadata.stream}:{raw.metadata.sequence.stream}"


class NatsConsumer(AsyncConsumer[Msg]):
    """Consumes one pull subscription. ``settings`` are those of :class:`oncekey.consumers.Consumer`."""

    extends = True
    id_hint = (
        'Set the header when you publish: js.publish(subject, body, headers={"Nats-Msg-Id": …}); or pass '
        "message_id=position, of oncekey.consumers.nats"
    )

    def __init__(
        self,
        once: OnceKey,
        js: JetStreamContext,
        subscription: JetStreamContext.PullSubscription,
        handler: Handler[Msg],
        **settings: Any,
    ) -> None:
        super().__init__(once, handler, **settings)
        if not hasattr(js, "find_stream_name_by_subject"):
            raise ConfigurationError("NatsConsumer(js=…): it takes a JetStream context, as client.jetstream() returns")
        if not hasattr(subscription, "fetch"):
            raise ConfigurationError(
                "NatsConsumer(subscription=…): it takes a pull subscription, such as "
                "await js.pull_subscribe('payments', durable='billing')"
            )
        self.js = js
        self.subscription = subscription
        self._config: ConsumerConfig | None = None

    async def consume(self) -> None:
        """Consume until cancelled."""
        for place in set(self.places.values()):
            await self.js.find_stream_name_by_subject(place)  # raises now if no stream keeps the dead letters
        try:
            while self._goes_on():
                try:
                    batch = await self.subscription.fetch(await self._free(), timeout=_FETCH_SECONDS)
                except TimeoutError:  # nats.errors.TimeoutError is one
                    continue
                for raw in batch:
                    await self._spawn(raw)
        finally:
            await self._drain()

    def queue_of(self, raw: Msg) -> str:
        return f"{raw.metadata.stream}/{raw.metadata.consumer}"

    def id_of(self, raw: Msg) -> object:
        return self.header_of(raw, ID_HEADER)

    def header_of(self, raw: Msg, name: str) -> str | None:
        return (raw.headers or {}).get(name)

    def body_of(self, raw: Msg) -> bytes:
        return raw.data

    def is_answered(self, raw: Msg) -> bool:
        return raw.is_acked

    async def _consumer_config(self) -> ConsumerConfig:
        if self._config is None:
            self._config = (await self.subscription.consumer_info()).config
        return self._config

    async def limit_reached(self, raw: Msg) -> str | None:
        most = (await self._consumer_config()).max_deliver or -1
        return f"max_deliver={most}" if 0 < most <= raw.metadata.num_delivered else None

    async def extend_every(self) -> float:
        config = await self._consumer_config()
        shortest: float = min([config.ack_wait or _ACK_WAIT, *(config.backoff or ())])
        return shortest / 3

    async def extend(self, raw: Msg) -> None:
        """While its handler runs, or it is kept, JetStream does not deliver it again."""
        await raw.in_progress()

    async def ack(self, raw: Msg) -> None:
        await raw.ack()

    async def retry(self, raw: Msg, delay: float) -> None:
        await raw.nak(delay=delay or None)

    async def copy(self, raw: Msg, place: str, headers: dict[str, str]) -> None:
        # By this id, JetStream drops a second copy of the same delivery, after a crash.
        copied = {ID_HEADER: f"oncekey:{position(raw)}"}
        await self.js.publish(place, raw.data, headers={**(raw.headers or {}), **headers, **copied})
