"""The layout of the table: what an item holds, how a key becomes an item, and where the index has it.

The table has three kinds of items, told apart by their sort key:

=============  =========================  ======================================================================
item           ``pk``, ``sk``             holds
=============  =========================  ======================================================================
a key          hash of (scope, key),      the record, its steps, its response and its audit. If the key is
               ``key``                    deleted and has an audit, the audit stays: an item without ``state``
a part         the same hash,             a piece of a body or of a step's result that is too large for the item
               ``part-…``                 (``parts.py``)
a pointer      hash of an id, the key's   nothing: it says that a step of this key has this downstream key or
               hash                       provider's id (``parts.py``)
=============  =========================  ======================================================================

Hashes spread keys over all partitions, also those of one busy tenant, and have the same length for every key.

The index ``upkeep`` has every key once, under its **place** (a word for its state, and one of ``BUCKETS``) and the time
at which it is **due**. A place is divided into buckets because one partition takes 1,000 writes per second. The index
``audit`` has the keys with an audit, under the time of their oldest line. Both are sparse: parts, pointers and what
needs no upkeep are not in them. An index lags behind its table, so rows that come from it are only candidates: each
move compares again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from oncekey.core.audit import AuditLine
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FINAL, Effects, State
from oncekey.core.steps import Step, StepKind, StepState

Item = dict[str, Any]
Values = Mapping[str, Any]

BUCKETS = 8
UPKEEP, AUDIT = "upkeep", "audit"
KEY = "key"
"""The sort key of a key's own item."""
DAY = 86_400

HALF_DONE, DEAD = "half_done", "dead"
"""Places of retryable keys with steps, and of unknown keys that upkeep asks about no more. The other places have the
names of states."""

_TEXTS = (
    "scope",
    "key",
    "operation",
    "effects",
    "state",
    "owner",
    "recovery_point",
    "last_error",
    "fingerprint_recipe",
)
_WHOLES = ("fingerprint_version", "attempt", "reconcile_tries")
_TIMES = (
    *("lease_until", "reconcile_at", "created_at", "finished_at"),
    *("retention_seconds", "expires_at", "quarantine_seconds"),
)
SLIM = (*_TEXTS, *_WHOLES, *_TIMES, "fingerprint")
"""The attributes of a record without its response: as many as an index can hold."""
RESPONSE = ("response_status", "response_headers", "response_version", "body", "body_parts")
STEPS = ("steps", "step_kinds", "step_providers", "step_order")
"""Maps by the name of a step. Kind, provider's id and order have maps of their own, because a later write of the step
must not change them, and one expression cannot look into a map that may be absent."""
OF_A_KEY = (*SLIM, *RESPONSE, *STEPS, "step_count", "place", "due", "ttl")
"""What goes when a key is deleted and its audit stays; but for its scope and key."""


def text(value: str) -> Item:
    return {"S": value}


def number(value: float) -> Item:
    return {"N": repr(value)}


def data(value: bytes) -> Item:
    return {"B": value}


def hash_of(*parts: str) -> str:
    """The same for the same texts only: each is preceded by its length."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()


def address(scope: str, key: str) -> Item:
    """The primary key of a key's item."""
    return {"pk": text(hash_of(scope, key)), "sk": text(KEY)}


def bucket(pk: str) -> int:
    return int(pk[:4], 16) % BUCKETS


# -- records -----------------------------------------------------------------------------------------------------


def attributes(row: Record) -> Item:
    """The attributes of a record without its response; those that are None are left out."""
    found: Item = {}
    for name in SLIM:
        value = getattr(row, name)
        if value is None:
            continue
        found[name] = data(value) if name == "fingerprint" else number(value) if name not in _TEXTS else text(value)
    return found


def is_key(item: Item | None) -> bool:
    """Whether there is a key: an item may hold no more than an audit."""
    return item is not None and "state" in item


def record(item: Item, now: float, response: StoredResponse | None = None) -> Record:
    """The record in an item. The caller has read the response, or does not need it."""
    found: dict[str, Any] = dict.fromkeys(SLIM)
    for name in _TEXTS:
        if name in item:
            found[name] = item[name]["S"]
    for name in _WHOLES:
        found[name] = int(item[name]["N"])
    for name in _TIMES:
        if name in item:
            found[name] = float(item[name]["N"])
    found["fingerprint"] = bytes(item["fingerprint"]["B"])
    found["state"], found["effects"] = State(found["state"]), Effects(found["effects"])
    return Record(**found, response=response, now=now)


def place_of(row: Record) -> tuple[str, float]:
    """Where the index ``upkeep`` has a row, and when it is due there."""
    match row.state:
        case State.IN_PROGRESS:
            return row.state, row.lease_until
        case State.UNKNOWN:
            return (DEAD, row.created_at) if row.reconcile_at is None else (row.state, row.reconcile_at)
        case State.FAILED_RETRYABLE if row.has_steps:
            # It has two duties: to be resumed, and to become unknown when it expires. It is here for the first of them.
            due = row.expires_at if row.reconcile_at is None else min(row.reconcile_at, row.expires_at)
            return HALF_DONE, due
        case State.EXPIRED:
            return row.state, row.expires_at + row.retention_seconds
    return row.state, row.expires_at


def placed(row: Record, pk: str) -> Item:
    """The attributes by which the index has a row."""
    name, due = place_of(row)
    return {"place": text(f"{name}#{bucket(pk)}"), "due": number(due)}


def time_to_live(row: Record) -> int | None:
    """When DynamoDB may delete the item by itself; None: never. It is a hint, for tables without upkeep: it comes after
    the reaper, which deletes such a key at its expiry, or at the end of a second retention with ``soft``."""
    over = row.state in (*FINAL, State.EXPIRED) or (row.state is State.FAILED_RETRYABLE and not row.has_steps)
    return int(row.expires_at + row.retention_seconds) + DAY if over else None


# -- responses ---------------------------------------------------------------------------------------------------


def response_attributes(response: StoredResponse, parts: str | None) -> Item:
    """A stored response. ``parts``: where its body is, if it is not in the item."""
    found = {
        "response_status": number(response.status),
        "response_headers": text(orjson.dumps(response.headers).decode()),
        "response_version": number(response.schema_version),
    }
    if parts is not None:
        found["body_parts"] = text(parts)
    elif response.body is not None:
        found["body"] = data(response.body)
    return found


def response_in(item: Item, body: bytes | None) -> StoredResponse | None:
    if "response_status" not in item:
        return None
    headers = tuple((name, said) for name, said in orjson.loads(item["response_headers"]["S"]))
    version = int(item["response_version"]["N"])
    return StoredResponse(int(item["response_status"]["N"]), headers, body, version)


# -- steps -------------------------------------------------------------------------------------------------------


def step_attributes(step: Step, parts: str | None) -> Item:
    """What each write of a step replaces. ``parts``: where its result is, if it is not in the item."""
    found: Item = {"state": text(step.state), "repeatable": {"BOOL": step.repeatable}}
    if step.downstream_key is not None:
        found["downstream_key"] = text(step.downstream_key)
    if parts is not None:
        found["parts"] = text(parts)
    elif step.result is not None:
        found["result"] = data(step.result)
    return {"M": found}


def step_items(item: Item | None) -> list[tuple[str, Item]]:
    """The names and attributes of the steps in an item, in the order in which they were first written."""
    if item is None or "steps" not in item:
        return []
    order = item["step_order"]["M"]
    steps = item["steps"]["M"]
    return [(name, steps[name]["M"]) for name in sorted(steps, key=lambda name: int(order[name]["N"]))]


def step_of(item: Item, name: str, said: Item, result: bytes | None) -> Step:
    provider = item["step_providers"]["M"].get(name)
    downstream = said.get("downstream_key")
    return Step(
        name,
        StepKind(item["step_kinds"]["M"][name]["S"]),
        StepState(said["state"]["S"]),
        bool(said["repeatable"]["BOOL"]),
        result,
        None if downstream is None else downstream["S"],
        None if provider is None else provider["S"],
    )


def result_in(said: Item) -> bytes | None:
    return bytes(said["result"]["B"]) if "result" in said else None


def ids_of(item: Item) -> set[tuple[str, str]]:
    """The ids that the steps of an item have, each with its kind."""
    found = {("provider_id", value["S"]) for value in item.get("step_providers", {"M": {}})["M"].values()}
    for _, said in step_items(item):
        if "downstream_key" in said:
            found.add(("downstream_key", said["downstream_key"]["S"]))
    return found


# -- the audit ---------------------------------------------------------------------------------------------------


def audit_text(line: AuditLine, order: int) -> str:
    """A line as it is stored. ``order`` tells lines of the same moment apart."""
    return orjson.dumps([order, line.at, line.who, line.event, line.before, line.after, line.why]).decode()


def audit_line(stored: str, scope: str, key: str) -> AuditLine:
    _, at, who, event, before, after, why = orjson.loads(stored)
    return AuditLine(at, who, event, scope, key, None, before, after, why)


def audit_at(stored: str) -> str:
    """The place of a line in the order of all lines, as text that sorts so."""
    order, at, *_ = orjson.loads(stored)
    return f"{at:020.6f}|{order:020d}"


def until_text(at: float) -> str:
    return f"{at:020.6f}~"


def audit_of(item: Item | None) -> Sequence[str]:
    return [] if item is None or "audit" not in item else [line["S"] for line in item["audit"]["L"]]
