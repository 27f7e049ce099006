"""A reservation or a swap as one conditional write. Pure: nothing here asks the table.

A swap compares in the write itself: state, owner, lease, expiry and effects, as ``Swap.fits`` says. What the new item
has is computed from the row that the mover saw; if that needs a field that may have changed under the same (state,
owner), the field is compared as well. A refusal then shows the present row, and the store tries again from that one.

**Every write carries a number** (``writer``, ``number``): the name of this store object, and a count. A write is
refused if the item has the same writer with the same or a higher number. So a request that is repeated after a lost
answer, by us or on the way, is applied once. If it was the first attempt that was applied, the item has our number: the
store recognises its own success. And a request that arrives long after a later one of the same owner changes nothing.
"""

from __future__ import annotations

from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, State
from oncekey.core.swaps import Swap
from oncekey.core.values import value
from oncekey.stores.dynamodb import items
from oncekey.stores.dynamodb.expressions import Expressions
from oncekey.stores.dynamodb.items import Item, number, text

KEPT = 9_999_999_999
"""The time to live of an item with an audit: DynamoDB never deletes it."""
_EMPTY: Item = {"M": {}}


@value
class Write:
    """One attempt of this store to change one item."""

    writer: str
    number: int
    now: float
    margin: float
    body_parts: str | None = None
    """Where the response's body is, if it is not in the item."""
    result_parts: str | None = None
    """Where the step's result is, if it is not in the item."""
    audit: str | None = None
    """The line of the audit, as it is stored."""

    def made(self, item: Item | None) -> bool:
        """Whether the item is what this write left."""
        return (
            item is not None
            and item.get("writer", {}).get("S") == self.writer
            and int(item["number"]["N"]) == self.number
        )

    def sign(self, change: Expressions) -> None:
        mine, nth = text(self.writer), number(self.number)
        change.where_either(
            f"attribute_not_exists({change.name('writer')})",
            f"{change.name('writer')} <> {change.value(mine)}",
            f"{change.name('number')} < {change.value(nth)}",
        )
        change.set("writer", mine)
        change.set("number", nth)


def reserve(wanted: Reservation, write: Write) -> Item:
    """Insert the row where there is none. An audit that outlived an earlier key stays."""
    change = Expressions()
    row = wanted.record(write.now)
    for name, said in {**items.attributes(row), **items.placed(row, items.hash_of(row.scope, row.key))}.items():
        change.set(name, said)
    _forget_steps(change)
    change.remove(("ttl",))
    change.where_there("state", there=False)
    change.set("writer", text(write.writer))
    change.set("number", number(write.number))
    return change.update()


def move(swap: Swap, seen: Record, write: Write) -> Item:
    """Move the row, if it still is as the swap says, and as ``seen`` where the new row depends on it."""
    change = Expressions()
    _compare(swap, change, write)
    write.sign(change)
    if swap.restart is not None:
        row = swap.restart.record(write.now)
        found = items.attributes(row)
        for name, said in found.items():
            change.set(name, said)
        change.remove(name for name in items.SLIM if name not in found)
    else:
        row = swap.moved(seen, write.now)
        _set_fields(swap, row, change)
        _compare_what_it_depends_on(swap, seen, change)
    for name, said in items.placed(row, items.hash_of(row.scope, row.key)).items():
        change.set(name, said)
    if swap.response is not None and swap.restart is None:
        found = items.response_attributes(swap.response, write.body_parts)
        for name, said in found.items():
            change.set(name, said)
        change.remove(name for name in items.RESPONSE if name not in found)
    else:
        change.remove(items.RESPONSE)
    if swap.forgets_steps:
        _forget_steps(change)
    elif swap.step is not None:
        _write_step(swap, change, write)
    _write_audit(change, write, row)
    return change.update()


def remove(swap: Swap, write: Write) -> Item:
    """Delete the item, if no audit is to stay."""
    change = Expressions()
    _compare(swap, change, write)
    change.where_there("audit", there=False)
    return change.condition()


def strip(swap: Swap, write: Write) -> Item:
    """Delete the key, and leave its audit."""
    change = Expressions()
    _compare(swap, change, write)
    write.sign(change)
    change.remove(name for name in items.OF_A_KEY if name not in ("scope", "key"))
    _write_audit(change, write, None)
    return change.update()


def note(scope: str, key: str, write: Write) -> Item:
    """Add a line to an audit that belongs to no key."""
    change = Expressions()
    write.sign(change)
    change.set("scope", text(scope))
    change.set("key", text(key))
    _write_audit(change, write, None)
    return change.update()


def _compare(swap: Swap, change: Expressions, write: Write) -> None:
    """As ``Swap.fits``, but that a lease of another counts a little longer: its owner's clock may be behind ours."""
    change.where("state", "=", text(swap.from_state))
    change.where("owner", "=", text(swap.owner))
    if swap.lease_over_by is not None:
        change.where("lease_until", "<=", number(write.now - max(swap.lease_over_by, write.margin)))
    if swap.past_expiry:
        change.where("expires_at", "<=", number(write.now))
    if swap.from_effects is not None:
        change.where("effects", "=", text(swap.from_effects))
    if swap.to_state is None and swap.from_state is State.IN_PROGRESS:
        change.where("attempt", "<=", number(1))
        change.where_there("recovery_point", there=False)


def _compare_what_it_depends_on(swap: Swap, seen: Record, change: Expressions) -> None:
    if swap.to_state is State.IN_PROGRESS:
        if swap.lease_seconds is None:
            change.where("lease_until", "=", number(seen.lease_until))
    elif swap.to_state is not State.UNKNOWN:
        change.where("expires_at", "=", number(seen.expires_at))
    if swap.to_state is State.FAILED_RETRYABLE and swap.recovery_point is None:
        change.where_there("recovery_point", there=seen.has_steps)


def _set_fields(swap: Swap, row: Record, change: Expressions) -> None:
    """The fields that the move changes, and no others: ``row`` may be older than the item in the others."""
    after = items.attributes(row)
    names = ["state", "last_error", "reconcile_at", "finished_at"]
    names += [
        name
        for name, given in (
            ("effects", swap.effects),
            ("attempt", swap.attempt),
            ("owner", swap.new_owner),
            ("lease_until", swap.lease_seconds),
            ("recovery_point", swap.recovery_point),
            ("reconcile_tries", swap.reconcile_tries),
        )
        if given is not None
    ]
    if row.state in FINAL or swap.settles:
        names.append("expires_at")
    for name in names:
        if name in after:
            change.set(name, after[name])
        else:
            change.remove((name,))


def _forget_steps(change: Expressions) -> None:
    for name in items.STEPS:
        change.set(name, _EMPTY)
    change.set("step_count", number(0))


def _write_step(swap: Swap, change: Expressions, write: Write) -> None:
    """As ``Step.written_over``: a kind and a provider's id are not forgotten, and a step keeps its place."""
    step = swap.step
    assert step is not None  # noqa: S101 - the caller has looked
    change.set(("steps", step.name), items.step_attributes(step, write.result_parts))
    change.set_once(("step_kinds", step.name), change.value(text(step.kind)))
    change.set_once(("step_order", step.name), change.name("step_count"))
    change.set_to("step_count", f"{change.name('step_count')} + {change.value(number(1))}")
    if step.provider_id:
        change.set(("step_providers", step.name), text(step.provider_id))


def _write_audit(change: Expressions, write: Write, row: Record | None) -> None:
    """Append the line, and set the time to live. ``row`` None: the key is deleted."""
    if (line := write.audit) is not None:
        lines = f"if_not_exists({change.name('audit')}, {change.value({'L': []})})"
        change.set_to("audit", f"list_append({lines}, {change.value({'L': [text(line)]})})")
        change.set_once(("audit_at",), change.value(text(items.audit_at(line))))
        change.set_once(("audit_place",), change.value(text(f"audit#{write.number % items.BUCKETS}")))
        change.set("keep", number(KEPT))
        if row is not None:
            change.set("ttl", number(KEPT))
    elif row is not None and (until := items.time_to_live(row)) is not None:
        change.set_to("ttl", f"if_not_exists({change.name('keep')}, {change.value(number(until))})")
    elif row is not None:
        change.remove(("ttl",))


def purge(row: Record, write: Write, *, strips: bool) -> Item:
    """Delete an expired row, if it still is the one that the index showed. ``strips``: leave its audit."""
    change = Expressions()
    change.where("state", "=", text(row.state))
    change.where("owner", "=", text(row.owner))
    change.where("expires_at", "=", number(row.expires_at))
    change.where_there("recovery_point", there=row.has_steps)
    if not strips:
        change.where_there("audit", there=False)
        return change.condition()
    change.where_there("audit")
    write.sign(change)
    change.remove(name for name in items.OF_A_KEY if name not in ("scope", "key"))
    return change.update()
