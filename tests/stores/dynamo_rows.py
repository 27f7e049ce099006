"""What tests do to items in DynamoDB from outside of the store, and stores behind a proxy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.client import Client, Item, Verb
from oncekey.stores.dynamodb.items import address, data, number, text
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.testing.proxy import TcpProxy

_TIMES = ("lease_until", "reconcile_at", "created_at", "finished_at", "expires_at", "due")


@contextmanager
def opened(url: str, **options: Any) -> Iterator[DynamoStore]:
    """A store over this table, which is made if it is not there."""
    clock = {"clock": options.pop("clock")} if "clock" in options else {}
    store = DynamoStore(replace(settings_of(url), **options), **clock)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def asking(url: str) -> Iterator[Verb]:
    """A client beside the store."""
    client = Client(replace(settings_of(url), timeout=30.0))
    try:
        yield client.verb()
    finally:
        client.close()


def through(proxy: TcpProxy, url: str) -> str:
    """The same table, through a proxy."""
    head, _, _ = url.partition("&endpoint=")
    return f"{head}&endpoint=http://{proxy.host}:{proxy.port}"


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def all_items(url: str) -> list[Item]:
    """Every item of the table: keys, parts and pointers."""
    with asking(url) as ask:
        items: list[Item] = []
        more: dict[str, Any] = {}
        while True:
            page = ask("scan", ConsistentRead=True, **more)
            items += page["Items"]
            if "LastEvaluatedKey" not in page:
                return items
            more = {"ExclusiveStartKey": page["LastEvaluatedKey"]}


def item(url: str, key: str, scope: str = "tenant-1") -> Item:
    with asking(url) as ask:
        found: Item = ask("get_item", Key=address(scope, key), ConsistentRead=True).get("Item", {})
        return found


def age(url: str, keys: Iterable[tuple[str, str]], seconds: float) -> None:
    """Move all times of these keys back."""
    with asking(url) as ask:
        for at in keys:
            found = ask("get_item", Key=address(*at), ConsistentRead=True)["Item"]
            moved = {name: number(float(found[name]["N"]) - seconds) for name in _TIMES if name in found}
            _set(ask, at, moved)


def change(url: str, scope: str, key: str, columns: Mapping[str, Any]) -> None:
    """Write into an item, as another version would have."""
    with asking(url) as ask:
        _set(ask, (scope, key), {name: _typed(value) for name, value in columns.items() if value is not None})
        for name in (name for name, value in columns.items() if value is None):
            ask(
                "update_item",
                Key=address(scope, key),
                UpdateExpression="REMOVE #n",
                ExpressionAttributeNames={"#n": name},
            )


def count(url: str) -> int:
    """How many keys there are."""
    return sum("state" in item for item in all_items(url))


def _set(ask: Verb, at: tuple[str, str], attributes: Item) -> None:
    names = {f"#n{nth}": name for nth, name in enumerate(attributes)}
    values = {f":v{nth}": value for nth, value in enumerate(attributes.values())}
    sets = ", ".join(f"#n{nth} = :v{nth}" for nth in range(len(names)))
    how = {"ExpressionAttributeNames": names, "ExpressionAttributeValues": values}
    ask("update_item", Key=address(*at), UpdateExpression=f"SET {sets}", **how)


def _typed(value: Any) -> Item:
    if isinstance(value, bytes):
        return data(value)
    return text(value) if isinstance(value, str) else number(value)
