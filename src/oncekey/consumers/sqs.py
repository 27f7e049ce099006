"""Amazon SQS, with boto3. ::

    sqs = boto3.client("sqs")
    SqsConsumer(once, sqs, queue_url, charge, dead_letter=dead_url).run()

The id is the message attribute ``message-id``, which the producer sets; for a FIFO queue, without that attribute, the
MessageDeduplicationId. ``message_id=position`` takes the MessageId that SQS gives: then a message that its producer
sent twice counts as two.

SQS takes at most 10 attributes. A copy has up to three of ours: the id, the reason and the queue. If there is no room,
the last two are left out; a message with 10 attributes of its own cannot be copied and stays in its queue.

``run`` handles one message at a time; call it in several threads or processes for more. While a message is in hand, a
thread extends its visibility timeout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

from oncekey.consumers.blocking import BlockingConsumer
from oncekey.consumers.consumer import QUEUE_HEADER, REASON_HEADER
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

_log = logging.getLogger("oncekey")

SqsMessage = dict[str, Any]
"""A message as ``receive_message`` returns it."""

ID_ATTRIBUTE: Final = "message-id"
_LONGEST_VISIBILITY: Final = 43_200
_MOST_ATTRIBUTES: Final = 10
_LONGEST_WAIT: Final = 20
_FIFO: Final = ".fifo"
_VISIBILITY: Final = 30
"""The default of SQS, in seconds."""


def position(raw: SqsMessage) -> str:
    """The id that SQS gave the message: the same at every delivery, and new if its producer sends it again."""
    return str(raw["MessageId"])


class SqsConsumer(BlockingConsumer[SqsMessage]):
    """Consumes one queue. ``settings`` are those of :class:`oncekey.consumers.Consumer`.

    ``dead_letter`` and ``parking`` are URLs of queues. ``wait``: for how many seconds a call waits for messages.
    """

    extends = True
    id_hint = (
        'Set the attribute when you send: MessageAttributes={"message-id": {"DataType": "String", "StringValue": …}}; '
        "or pass message_id=position, of oncekey.consumers.sqs"
    )

    def __init__(
        self,
        once: OnceKey,
        client: Any,
        queue_url: str,
        handler: Callable[[SqsMessage], Any],
        *,
        wait: int = 20,
        **settings: Any,
    ) -> None:
        super().__init__(once, handler, **settings)
        if not hasattr(client, "receive_message") or "://" not in str(queue_url):
            raise ConfigurationError(
                "SqsConsumer(client, queue_url): it takes boto3.client('sqs') and the URL of a queue, as "
                "client.get_queue_url(QueueName='payments')['QueueUrl'] returns it"
            )
        if type(wait) is not int or not 0 <= wait <= _LONGEST_WAIT:
            raise ConfigurationError(
                f"SqsConsumer(wait={wait!r}): it takes a whole number of seconds from 0 to {_LONGEST_WAIT}"
            )
        self.client = client
        self.queue_url = queue_url
        self.wait = wait
        self._visibility = 0

    def consume(self) -> None:
        """Consume until :meth:`stop`."""
        for place in set(self.places.values()):
            self.client.get_queue_attributes(QueueUrl=place, AttributeNames=["QueueArn"])  # raises if there is none
        while not self._stopping.is_set():
            found = self.receive()
            for raw in found:
                self._take(raw)  # those that wait for their turn are extended, too
            try:
                for raw in found:
                    if self._stopping.is_set():
                        self._give_back(raw, 0.0)
                    else:
                        self.on_message(raw)
            finally:
                for raw in found:
                    self._in_hand.pop(id(raw), None)

    def receive(self) -> list[SqsMessage]:
        """Ask for messages, with the attributes that this adapter reads."""
        answer = self.client.receive_message(
            QueueUrl=self.queue_url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=self.wait,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        )
        return list(answer.get("Messages", ()))

    def queue_of(self, raw: SqsMessage) -> str:
        del raw
        return self.queue_url.rpartition("/")[2]

    def id_of(self, raw: SqsMessage) -> object:
        given = self.header_of(raw, ID_ATTRIBUTE)
        return given or raw.get("Attributes", {}).get("MessageDeduplicationId")

    def header_of(self, raw: SqsMessage, name: str) -> str | None:
        found: str | None = raw.get("MessageAttributes", {}).get(name, {}).get("StringValue")
        return found

    def body_of(self, raw: SqsMessage) -> bytes:
        return str(raw["Body"]).encode()

    def ack(self, raw: SqsMessage) -> None:
        self.client.delete_message(QueueUrl=self.queue_url, ReceiptHandle=raw["ReceiptHandle"])

    def retry(self, raw: SqsMessage, delay: float) -> None:
        seconds = min(math.ceil(delay), _LONGEST_VISIBILITY)
        self.client.change_message_visibility(
            QueueUrl=self.queue_url, ReceiptHandle=raw["ReceiptHandle"], VisibilityTimeout=seconds
        )

    def extend_every(self) -> float:
        try:
            found = self.client.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=["VisibilityTimeout"])
            self._visibility = int(found["Attributes"]["VisibilityTimeout"])
        except Exception as error:
            _log.warning("SQS did not say the visibility timeout of %s (%s): 30 s is assumed", self.queue_url, error)
        self._visibility = self._visibility or _VISIBILITY
        return self._visibility / 3

    def extend(self, raw: SqsMessage) -> None:
        """While its handler runs, or it is kept or waits for its turn, SQS does not deliver it again."""
        self.retry(raw, self._visibility)

    def copy(self, raw: SqsMessage, place: str, headers: dict[str, str]) -> None:
        own = {
            name: {kind: content for kind, content in attribute.items() if not kind.endswith("ListValues")}
            for name, attribute in raw.get("MessageAttributes", {}).items()
        }
        ours = {name: {"DataType": "String", "StringValue": text} for name, text in headers.items()}
        both = own | ours
        for name in (QUEUE_HEADER, REASON_HEADER):
            if len(both) > _MOST_ATTRIBUTES and name not in own:
                del both[name]
        if len(both) > _MOST_ATTRIBUTES:
            raise ValueError("SQS takes 10 attributes, and the copy needs one for the id: send messages with at most 9")
        given: dict[str, Any] = {"QueueUrl": place, "MessageBody": raw["Body"], "MessageAttributes": both}
        if place.endswith(_FIFO):
            system = raw.get("Attributes", {})
            given["MessageGroupId"] = system.get("MessageGroupId", "oncekey")
            given["MessageDeduplicationId"] = raw["MessageId"]
        self.client.send_message(**given)
