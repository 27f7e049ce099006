"""The table: how it is made, and whether it is as this version needs it."""

from __future__ import annotations

import time
from typing import Any

from oncekey.errors import SchemaError, StoreError, StoreUnavailable
from oncekey.stores.dynamodb import items
from oncekey.stores.dynamodb.client import Client, InUse, Verb
from oncekey.stores.dynamodb.settings import Settings

MIGRATION = "0001_table"
READY_SECONDS = 120.0
"""How long ``migrate`` waits for a new table. Amazon takes some ten seconds to make one."""
_POLL_SECONDS = 0.25
_KEYS = {"pk": "HASH", "sk": "RANGE"}
_INDEXES: dict[str, tuple[dict[str, str], list[str]]] = {
    items.UPKEEP: ({"place": "HASH", "due": "RANGE"}, list(items.SLIM)),
    items.AUDIT: ({"audit_place": "HASH", "audit_at": "RANGE"}, ["state"]),
}
_NUMBERS = {"due"}
TTL = "ttl"


def _schema(names: dict[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in names.items()]


def definition() -> dict[str, Any]:
    """For ``create_table``: on-demand capacity, so that nothing has to be planned."""
    names = [*_KEYS, *(name for keys, _ in _INDEXES.values() for name in keys)]
    return {
        "BillingMode": "PAY_PER_REQUEST",
        "KeySchema": _schema(_KEYS),
        "AttributeDefinitions": [
            {"AttributeName": name, "AttributeType": "N" if name in _NUMBERS else "S"} for name in names
        ],
        "GlobalSecondaryIndexes": [
            {
                "IndexName": index,
                "KeySchema": _schema(keys),
                "Projection": {"ProjectionType": "INCLUDE", "NonKeyAttributes": projected},
            }
            for index, (keys, projected) in _INDEXES.items()
        ],
    }


def migrate(client: Client, settings: Settings) -> list[str]:
    """Make the table, if it is not there, and wait until it can be used. Two processes may do so at once."""
    ran = []
    try:
        client.verb()("create_table", **definition())
        ran.append(MIGRATION)
    except InUse:
        pass  # it is there, or another process is making it
    deadline = time.monotonic() + READY_SECONDS
    while True:
        ask = client.verb()
        try:
            table = described(ask)
        except SchemaError:
            table = None  # the table is so new that not every server knows it
        if table is not None and _usable(table):
            break
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"{settings.where} was not ready within {READY_SECONDS:.0f} s: try again")
        time.sleep(_POLL_SECONDS)
    if sentence := _difference(table, settings):
        raise SchemaError(sentence)
    if time_to_live(ask) is False:
        _enable_time_to_live(ask)
    return ran


def outdated(ask: Verb, settings: Settings) -> str | None:
    """What is wrong with the table, and what to run; None: it is as this version needs it."""
    try:
        table = described(ask)
    except SchemaError as missing:
        return str(missing)
    if not _usable(table):
        return f"{settings.where} is being made or deleted: run `oncekey migrate`, which waits for it"
    return _difference(table, settings)


def described(ask: Verb) -> dict[str, Any]:
    found: dict[str, Any] = ask("describe_table")["Table"]
    return found


def _usable(table: dict[str, Any]) -> bool:
    indexes = table.get("GlobalSecondaryIndexes", [])
    usable = ("ACTIVE", "UPDATING")
    return table["TableStatus"] in usable and all(index.get("IndexStatus", "ACTIVE") in usable for index in indexes)


def _difference(table: dict[str, Any], settings: Settings) -> str | None:
    keys = {each["AttributeName"]: each["KeyType"] for each in table["KeySchema"]}
    if keys != _KEYS:
        return f"{settings.where} is not a table of oncekey: name another one, and run `oncekey migrate`"
    there = {index["IndexName"]: index for index in table.get("GlobalSecondaryIndexes", [])}
    missing = [name for name in _INDEXES if name not in there]
    if missing:
        return (
            f"{settings.where} has no index {', '.join(missing)}, which this version needs: name another table, and "
            "run `oncekey migrate`"
        )
    return None


def time_to_live(ask: Verb) -> bool | None:
    """Whether DynamoDB deletes items by the attribute ``ttl``; None: it cannot be asked."""
    try:
        said = ask("describe_time_to_live")["TimeToLiveDescription"]
    except (StoreError, StoreUnavailable):  # a server for tests, or the policy does not allow it
        return None
    return said.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")


def _enable_time_to_live(ask: Verb) -> None:
    """It is a hint: without it, upkeep still deletes every key, and only what a killed process left stays."""
    try:
        ask("update_time_to_live", TimeToLiveSpecification={"Enabled": True, "AttributeName": TTL})
    except (StoreError, StoreUnavailable):
        return
