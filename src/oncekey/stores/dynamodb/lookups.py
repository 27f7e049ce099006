"""Steps, and the reads for operators, webhooks and health checks: audit lines, lists, numbers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from oncekey.core.audit import AuditLine
from oncekey.core.health import COUNTED, StoreHealth, health_of
from oncekey.core.record import Record
from oncekey.core.states import FINAL, State
from oncekey.core.steps import Step, StepsOf
from oncekey.errors import StoreUnavailable
from oncekey.stores.api import FOUND
from oncekey.stores.dynamodb import items
from oncekey.stores.dynamodb.client import Conflict, Verb
from oncekey.stores.dynamodb.expressions import Expressions
from oncekey.stores.dynamodb.items import Item, number, text
from oncekey.stores.dynamodb.parts import Gone, Parts

_PLACES: tuple[str, ...] = (*State, items.HALF_DONE, items.DEAD)
_OF_STATE: dict[State, tuple[str, ...]] = {
    State.FAILED_RETRYABLE: (State.FAILED_RETRYABLE, items.HALF_DONE),
    State.UNKNOWN: (State.UNKNOWN, items.DEAD),
}
_STEPS = ("pk", "scope", "key", "state", *items.STEPS)
_TRIES = 5


class Lookups(Parts):
    """A part of :class:`oncekey.stores.dynamodb.store.DynamoStore`."""

    _clock: Callable[[], float]

    # -- steps ---------------------------------------------------------------------------------------------------

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        if not keys:
            return []
        ask = self._client.verb()
        for _ in range(_TRIES):
            found = self._get_items(ask, [items.address(asked.scope, asked.key) for asked in keys], _STEPS)
            try:
                return [self._read_steps(ask, found.get(items.hash_of(asked.scope, asked.key))) for asked in keys]
            except Gone:
                continue
        raise StoreUnavailable("the steps of a key changed while they were read")

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        ask = self._client.verb(long=True)
        asked = {("downstream_key", downstream_key), ("provider_id", provider_id)}
        wanted = {(kind, said) for kind, said in asked if said is not None}
        pointed = {pk for kind, said in wanted for pk in self._pointed_at(ask, kind, said)}
        if not pointed:
            return []
        found = self._get_items(ask, [{"pk": text(pk), "sk": text(items.KEY)} for pk in pointed], _STEPS)
        keys = [(item["scope"]["S"], item["key"]["S"]) for item in found.values() if wanted & items.ids_of(item)]
        return sorted(keys)[:FOUND]

    # -- the audit -----------------------------------------------------------------------------------------------

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        at = items.address(scope, key)
        found = self._get_items(self._client.verb(), [at], ("pk", "audit")).get(at["pk"]["S"])
        lines = items.audit_of(found)
        return [items.audit_line(line, scope, key) for line in reversed(lines)][:limit]

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        ask = self._client.verb(long=True)
        until = items.until_text(self._clock() - keep_seconds)
        over = [text(state) for state in (*FINAL, State.EXPIRED)]
        deleted = 0
        for pk in self._audited(ask, until, over, limit):
            if deleted >= limit:
                break
            deleted += self._purge_lines(ask, pk, until, over, limit - deleted)
        return deleted

    def _audited(self, ask: Verb, until: str, over: Sequence[Item], limit: int) -> list[str]:
        """The keys that are over and have a line from before ``until``; that with the oldest line is first."""

        def of_bucket(nth: int) -> list[Item]:
            values = {":place": text(f"audit#{nth}"), ":until": text(until)}
            values |= {f":s{at}": state for at, state in enumerate(over)}
            return self._pages(
                ask,
                limit,
                IndexName=items.AUDIT,
                KeyConditionExpression="audit_place = :place AND audit_at <= :until",
                FilterExpression=f"attribute_not_exists(#s) OR #s IN ({', '.join(f':s{n}' for n in range(len(over)))})",
                ExpressionAttributeNames={"#s": "state"},
                ExpressionAttributeValues=values,
            )

        found = [entry for page in ask.all(of_bucket, range(items.BUCKETS)) for entry in page]
        return [entry["pk"]["S"] for entry in sorted(found, key=lambda entry: str(entry["audit_at"]["S"]))]

    def _purge_lines(self, ask: Verb, pk: str, until: str, over: Sequence[Item], limit: int) -> int:
        """Delete the oldest lines of one key, if it still is over; return how many."""
        at = {"pk": text(pk), "sk": text(items.KEY)}
        item = self._get_items(ask, [at], ("pk", "audit", "state")).get(pk)
        lines = items.audit_of(item)
        doomed = [line for line in lines if items.audit_at(line) <= until][:limit]
        if item is None or not doomed or (items.is_key(item) and item["state"] not in over):
            return 0
        change = Expressions()
        change.where(("audit", 0), "=", text(lines[0]))  # lines are added at the end: so all of these are there
        if items.is_key(item):
            change.where("state", "=", item["state"])
        else:
            change.where_there("state", there=False)
        try:
            if len(doomed) < len(lines):
                change.set("audit_at", text(items.audit_at(lines[len(doomed)])))
                change.remove([("audit", nth) for nth in range(len(doomed))])
                ask("update_item", Key=at, **change.update())
            else:
                change.where_there("audit")
                _only_these_lines(change, lines)
                if items.is_key(item):
                    change.remove(("audit", "audit_at", "audit_place", "keep"))
                    ask("update_item", Key=at, **change.update())
                else:
                    ask("delete_item", Key=at, **change.condition())
        except Conflict:
            return 0
        return len(doomed)

    # -- lists and numbers ---------------------------------------------------------------------------------------

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: tuple[str, str] | None = None,
    ) -> list[Record]:
        ask = self._client.verb(long=True)
        now = self._clock()
        until = None if older_than is None else now - older_than
        places = _PLACES if state is None else _OF_STATE.get(state, (state,))
        rows = (items.record(entry, now) for entry in self._entries(ask, places, most=None, scope=scope))
        met = (row for row in rows if row.meets(state, scope, operation, until))
        later = (row for row in met if after is None or (row.scope, row.key) > after)
        return heapq.nsmallest(limit, later, key=lambda row: (row.scope, row.key))

    def counts(self) -> StoreHealth:
        ask = self._client.verb(long=True)
        now = self._clock()
        looked_at = (State.IN_PROGRESS, State.UNKNOWN, items.HALF_DONE, items.DEAD)
        rows = [items.record(entry, now) for entry in self._entries(ask, looked_at)]
        health = health_of(rows, now)
        counts = dict(health.counts)
        for state in State:
            if state not in looked_at:
                counts[state] = min(counts[state] + self._counted(ask, state), COUNTED)
        return replace(health, counts=counts)

    def _counted(self, ask: Verb, place: str) -> int:
        def of_bucket(nth: int) -> int:
            request = {**_of_place(f"{place}#{nth}", None), "Select": "COUNT"}
            total = 0
            while total < COUNTED:
                answer = ask("query", **request)
                total += int(answer["Count"])
                if "LastEvaluatedKey" not in answer:
                    break
                request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]
            return total

        return sum(ask.all(of_bucket, range(items.BUCKETS)))

    # -- the index -----------------------------------------------------------------------------------------------

    def _entries(
        self,
        ask: Verb,
        places: Sequence[str],
        *,
        until: float | None = None,
        most: int | None = COUNTED,
        scope: str | None = None,
    ) -> list[Item]:
        """Entries of the index ``upkeep`` in these places, in no order; in each bucket the ``most`` that are due first.

        ``until``: only entries that are due by then. ``most`` None: all.
        """

        def of_bucket(place: str) -> list[Item]:
            request = _of_place(place, until)
            if scope is not None:
                request["FilterExpression"] = "#scope = :scope"
                request["ExpressionAttributeNames"] = {"#scope": "scope"}
                request["ExpressionAttributeValues"][":scope"] = text(scope)
            return self._pages(ask, most, **request)

        buckets = [f"{place}#{nth}" for place in places for nth in range(items.BUCKETS)]
        return [entry for page in ask.all(of_bucket, buckets) for entry in page]

    def _pages(self, ask: Verb, most: int | None, **request: Any) -> list[Item]:
        """The answers of a query, page by page."""
        found: list[Item] = []
        if most is not None and "FilterExpression" not in request:
            request["Limit"] = most
        while True:
            answer = ask("query", **request)
            found += answer["Items"]
            if "LastEvaluatedKey" not in answer or (most is not None and len(found) >= most):
                return found if most is None else found[:most]
            request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


def _of_place(place: str, until: float | None) -> dict[str, Any]:
    condition = "place = :place" if until is None else "place = :place AND due <= :until"
    values = {":place": text(place)} | ({} if until is None else {":until": number(until)})
    return {
        "IndexName": items.UPKEEP,
        "KeyConditionExpression": condition,
        "ExpressionAttributeValues": values,
    }


def _only_these_lines(change: Expressions, lines: Sequence[str]) -> None:
    """No line was added since."""
    size = change.value(number(len(lines)))
    change.where_either(f"size({change.name('audit')}) = {size}")
