"""What does not fit into a key's item: large values, and the ids by which webhooks find a key.

**Parts.** An item holds 400 KB. A body or a result that is larger than ``INLINE`` is written to items of its own first,
under a new name, and the write of the key's item then names them. So a reader of the key finds all parts, or finds the
key changed. Parts that no item names (the write was refused, or the process died) have a time to live.

**Pointers.** A step's downstream key and provider's id are written as an item of their own before the step. A pointer
to a key whose steps do not have the id is not believed, so an old one does no harm.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from oncekey.core.record import Record, StoredResponse
from oncekey.core.steps import Step
from oncekey.errors import StoreUnavailable
from oncekey.stores.dynamodb import items
from oncekey.stores.dynamodb.client import Client, Verb, chunks
from oncekey.stores.dynamodb.items import DAY, Item, data, number, text

INLINE = {"body": 100_000, "result": 16_000}
"""How large a value may be inside of a key's item: so there is room for a body, some steps and an audit."""
PART = 350_000
LONGEST_DAYS = 400
"""How long a pointer and a part of a step's result live at most. They are deleted with their key; this is for those
whose process died."""
_POINTERS = 1000
"""How many pointers of one id are read: more than that is no provider's id."""
_GET, _WRITE = 100, 25
"""How many items one request reads or writes."""


class Parts:
    """A part of :class:`oncekey.stores.dynamodb.store.DynamoStore`."""

    _client: Client
    _table: str

    # -- large values --------------------------------------------------------------------------------------------

    def _put_parts(self, ask: Verb, pk: str, kind: str, value: bytes | None, until: float | None = None) -> str | None:
        """Write a large value in parts, and return their name. None: it fits into the item.

        ``until``: when its key is over. The result of a step is read for as long as its key is not over, which has no
        end.
        """
        if value is None or len(value) <= INLINE[kind]:
            return None
        token = secrets.token_hex(8)
        end = number(int(time.time()) + LONGEST_DAYS * DAY if until is None else int(until) + DAY)
        pieces = [value[at : at + PART] for at in range(0, len(value), PART)]
        for nth, piece in enumerate(pieces):
            at = {"pk": text(pk), "sk": text(f"part-{token}-{nth}")}
            ask("put_item", Item={**at, "piece": data(piece), "ttl": end})
        return f"{token}-{len(pieces)}"

    def _parts_at(self, pk: str, name: str) -> list[Item]:
        token, _, count = name.rpartition("-")
        return [{"pk": text(pk), "sk": text(f"part-{token}-{nth}")} for nth in range(int(count))]

    def _get_parts(self, ask: Verb, pk: str, name: str) -> bytes | None:
        """The value; None: it is deleted, together with its key."""
        pieces = [ask("get_item", Key=at, ConsistentRead=True).get("Item") for at in self._parts_at(pk, name)]
        if None in pieces:
            return None
        return b"".join(bytes(piece["piece"]["B"]) for piece in pieces if piece is not None)

    def _read_record(self, ask: Verb, item: Item, now: float) -> Record:
        """The record in an item, with its response."""
        return items.record(item, now, self._read_response(ask, item))

    def _read_response(self, ask: Verb, item: Item) -> StoredResponse | None:
        if "body_parts" not in item:
            return items.response_in(item, bytes(item["body"]["B"]) if "body" in item else None)
        scope, key = item["scope"]["S"], item["key"]["S"]
        body = self._get_parts(ask, items.hash_of(scope, key), item["body_parts"]["S"])
        if body is None:
            raise Gone
        return items.response_in(item, body)

    def _read_steps(self, ask: Verb, item: Item | None) -> list[Step]:
        found = []
        for name, said in items.step_items(item):
            assert item is not None  # noqa: S101 - it has steps
            result = items.result_in(said)
            if "parts" in said:
                pk = items.hash_of(item["scope"]["S"], item["key"]["S"])
                result = self._get_parts(ask, pk, said["parts"]["S"])
                if result is None:
                    raise Gone
            found.append(items.step_of(item, name, said, result))
        return found

    # -- pointers ------------------------------------------------------------------------------------------------

    def _put_pointers(self, ask: Verb, pk: str, step: Step | None) -> None:
        """Make the key findable by the ids of a step, before the step is written."""
        if step is None:
            return
        until = number(int(time.time()) + LONGEST_DAYS * DAY)
        for kind, said in (("downstream_key", step.downstream_key), ("provider_id", step.provider_id)):
            if said is not None:
                ask("put_item", Item={"pk": text(_id(kind, said)), "sk": text(pk), "ttl": until})

    def _pointed_at(self, ask: Verb, kind: str, said: str) -> list[str]:
        """The hashes of keys whose steps may have this id."""
        request: dict[str, Any] = {
            "KeyConditionExpression": "pk = :pk",
            "ExpressionAttributeValues": {":pk": text(_id(kind, said))},
            "ConsistentRead": True,
            "Limit": _POINTERS,
        }
        return [item["sk"]["S"] for item in ask("query", **request)["Items"]]

    # -- both ----------------------------------------------------------------------------------------------------

    def _clean_up(self, ask: Verb, old: Item, *, steps: bool, step: str | None = None) -> None:
        """Delete what a key's item named and names no more. It is not read any more, so a failure leaves no more than
        items that have a time to live. ``steps``: all steps are forgotten. ``step``: this one is written again."""
        if "scope" not in old or "key" not in old:
            return
        pk = items.hash_of(old["scope"]["S"], old["key"]["S"])
        doomed = self._parts_at(pk, old["body_parts"]["S"]) if "body_parts" in old else []
        for name, said in items.step_items(old):
            if (steps or name == step) and "parts" in said:
                doomed += self._parts_at(pk, said["parts"]["S"])
        if steps:
            doomed += [{"pk": text(_id(kind, said)), "sk": text(pk)} for kind, said in items.ids_of(old)]
        self._delete_quietly(ask, doomed)

    def _drop_parts(self, ask: Verb, pk: str, *names: str | None) -> None:
        """Delete the parts of a write that was refused."""
        self._delete_quietly(ask, [at for name in names if name is not None for at in self._parts_at(pk, name)])

    def _delete_quietly(self, ask: Verb, doomed: Iterable[Item]) -> None:
        try:
            for some in chunks(doomed, _WRITE):
                requests = [{"DeleteRequest": {"Key": at}} for at in some]
                ask("batch_write_item", RequestItems={self._table: requests})
        except StoreUnavailable:
            return

    def _get_items(self, ask: Verb, wanted: Iterable[Item], projection: tuple[str, ...]) -> dict[str, Item]:
        """Items by their hash, as committed."""
        at = {key["pk"]["S"]: key for key in wanted}
        names = {f"#n{nth}": name for nth, name in enumerate(projection)}
        how = {"ConsistentRead": True, "ProjectionExpression": ", ".join(names), "ExpressionAttributeNames": names}
        if len(at) == 1:
            ((pk, key),) = at.items()
            item = ask("get_item", Key=key, **how).get("Item")
            return {} if item is None else {pk: item}

        def some(keys: list[Item]) -> list[Item]:
            left: Any = {self._table: {"Keys": keys, **how}}
            found: list[Item] = []
            while left:
                answer = ask("batch_get_item", RequestItems=left)
                found += answer["Responses"].get(self._table, [])
                left = answer.get("UnprocessedKeys")
            return found

        pages = ask.all(some, chunks(at.values(), _GET))
        return {item["pk"]["S"]: item for page in pages for item in page}


class Gone(Exception):
    """A part is not there: the key was deleted or started over after its item was read. Read the item again."""


def _id(kind: str, said: str) -> str:
    return "id-" + items.hash_of(kind, said)
