"""What upkeep and operators ask of Redis: due rows, purges, lists, numbers, the audit. Part of ``RedisStore``.

Each question goes to all buckets in one round trip per server. The answers of the buckets are in order, and are merged
here. A purge asks first and then deletes what is oldest over all buckets; the script looks at each row again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.audit import AuditLine
from oncekey.core.health import (
    COUNTED,
    NO_RESOLVER,
    OPERATIONS,
    WAITING_SECONDS,
    HalfDoneOf,
    StoreHealth,
    UnknownsOf,
)
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.api import Duty
from oncekey.stores.redis import rows, scripts
from oncekey.stores.redis.buckets import BUCKETS, at_of, bucket_of, name_of

if TYPE_CHECKING:
    from oncekey.stores.duties import Turns
    from oncekey.stores.redis.scripts import Script

SHELVES: dict[State, tuple[bytes, ...]] = {
    **{state: (state.encode(),) for state in State},
    State.FAILED_RETRYABLE: (b"failed_retryable", b"half_done"),
}
_PURGED = (b"completed", b"failed", b"failed_retryable")
_DUE: dict[Duty, tuple[bytes, ...]] = {
    Duty.LEASES: (b"shelf:in_progress",),
    Duty.EXPIRED: tuple(b"shelf:" + shelf for shelf in _PURGED),
    Duty.ABANDONED: (b"shelf:pending",),
    Duty.UNKNOWNS: (b"shelf:unknown",),
    Duty.LAPSED: (b"shelf:half_done",),
    Duty.RESUMABLE: (b"resumable",),
}
FEW = 2_000
"""A listing of one state reads the shelf of that state, if a bucket has no more rows on it. Otherwise it reads the
names of all keys in their order."""
PAGE = 500


class Lookups:
    if TYPE_CHECKING:
        _turns: Turns

        def _all(self, script: Script, *values: bytes) -> list[Any]: ...
        def _in_buckets(self, script: Script, values: dict[int, Sequence[bytes]]) -> list[Any]: ...
        def _each(
            self, script: Script, names: Sequence[bytes], values: Any, *, confirmed: bool
        ) -> list[tuple[int, Any, float]]: ...

    # -- duties --------------------------------------------------------------------------------------------------

    def due(self, duty: Duty, limit: int) -> list[Record]:
        def visit(after: str, most: int) -> list[tuple[str, bool]]:
            found: dict[str, bool] = {}
            for pairs in self._all(scripts.SCOPES, duty.encode(), rows.text(after), b"%d" % most):
                for scope, is_due in pairs:
                    found[scope.decode()] = bool(is_due) or found.get(scope.decode(), False)
            return sorted(found.items())[:most]

        def take(scopes: Sequence[str], most: int) -> list[Record]:
            sets = [b"ask:%s:%s" % (duty.encode(), rows.text(scope)) for scope in scopes]
            taken: Counter[str] = Counter()
            chosen = []
            for _, _, record in self._due(sets, most):
                taken[record.scope] += 1
                if taken[record.scope] <= most:
                    chosen.append(record)
            return chosen

        oldest = [record for _, _, record in self._due(_DUE[duty], limit)[:limit]]
        return self._turns.hand_out(duty, limit, oldest, visit, take)

    def _due(self, sets: Iterable[bytes], limit: int) -> list[tuple[int, bytes, Record]]:
        """The due rows of these sorted sets, at most ``limit`` of each bucket and set: when, name, row."""
        found = []
        for now, *answers in self._all(scripts.DUE, b"%d" % limit, *sets):
            for name, when, fields in answers:
                found.append((int(when), name, rows.record(*at_of(name), fields, int(now) / 1e6)))
        return sorted(found, key=lambda each: (each[0], each[1]))

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        doomed = [] if expired_state_only else self._due(_DUE[Duty.EXPIRED], limit)[:limit]
        doomed += self._due([b"shelf:expired"], limit)[: limit - len(doomed)]
        values: dict[int, Sequence[bytes]] = {}
        for _, name, record in doomed:
            values[bucket_of(name)] = [*values.get(bucket_of(name), ()), record.state.encode() + b" " + name]
        return sum(self._in_buckets(scripts.REMOVE, values))

    # -- the audit -----------------------------------------------------------------------------------------------

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        name = name_of(scope, key)
        (lines,) = self._in_buckets(scripts.AUDIT, {bucket_of(name): (name, b"%d" % limit)})
        return [rows.audit_line(line, scope, key) for line in lines]

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        found = []
        asked = (b"%d" % rows.micros(keep_seconds), b"%d" % limit)
        for bucket, lines in zip(BUCKETS, self._all(scripts.AUDIT_DUE, *asked), strict=True):
            found += [(int(at), line, bucket) for line, at in lines]
        values: dict[int, Sequence[bytes]] = {}
        for _, line, bucket in sorted(found)[:limit]:
            values[bucket] = [*values.get(bucket, ()), line]
        return sum(self._in_buckets(scripts.AUDIT_PURGE, values))

    # -- lists ---------------------------------------------------------------------------------------------------

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: tuple[str, str] | None = None,
    ) -> list[Record]:
        if state is not None and (few := self._few(state)) is not None:
            return list(islice(self._of_few(few, state, scope, operation, older_than, after), limit))
        return self._walk(state, scope, operation, older_than, limit, after)[:limit]

    def _few(self, state: State) -> list[bytes] | None:
        """The names of all rows in this state, if they are few."""
        found = self._all(scripts.SHELF, b"%d" % FEW, *SHELVES[state])
        return None if None in found else [name for names in found for name in names]

    def _of_few(
        self,
        names: list[bytes],
        state: State,
        scope: str | None,
        operation: str | None,
        older_than: float | None,
        after: tuple[str, str] | None,
    ) -> Iterator[Record]:
        wanted = sorted(
            at for at in map(at_of, names) if (scope is None or at[0] == scope) and (after is None or at > after)
        )
        for start in range(0, len(wanted), PAGE):
            page = wanted[start : start + PAGE]
            found = self._each(scripts.SLIM, [name_of(*at) for at in page], None, confirmed=False)
            for position, fields, now in sorted(found, key=lambda each: each[0]):
                if fields is None:
                    continue
                record = rows.record(*page[position], fields, now)
                if record.meets(state, scope, operation, None if older_than is None else record.now - older_than):
                    yield record

    def _walk(
        self,
        state: State | None,
        scope: str | None,
        operation: str | None,
        older_than: float | None,
        limit: int,
        after: tuple[str, str] | None,
    ) -> list[Record]:
        """The first rows of each bucket in the order of their names, merged."""
        first, last = b"-", b"+"
        if scope is not None:
            first, last = b"[" + rows.text(scope) + b"\0", b"(" + rows.text(scope) + b"\1"
        if after is not None and name_of(*after) >= first[1:]:
            first = b"(" + name_of(*after)
        age = b"" if older_than is None else b"%d" % rows.micros(older_than)
        filters = (rows.text(state or ""), rows.text(operation or ""), age)
        most = b"%d" % min(PAGE, limit)
        found: list[Record] = []
        left = dict.fromkeys(BUCKETS, first)
        got: Counter[int] = Counter()
        while left:
            asked: dict[int, Sequence[bytes]] = {
                bucket: (begin, last, most, *filters) for bucket, begin in left.items()
            }
            for bucket, (now, reached, *answers) in zip(asked, self._in_buckets(scripts.LISTING, asked), strict=True):
                found += [rows.record(*at_of(name), fields, int(now) / 1e6) for name, fields in answers]
                got[bucket] += len(answers)
                left[bucket] = b"(" + reached
                if not reached or got[bucket] >= limit:
                    del left[bucket]
        return sorted(found, key=lambda record: (record.scope, record.key))

    # -- numbers -------------------------------------------------------------------------------------------------

    def counts(self) -> StoreHealth:
        asked = (b"%d" % COUNTED, NO_RESOLVER.encode(), b"%d" % rows.micros(WAITING_SECONDS))
        buckets = [orjson.loads(answer) for answer in self._all(scripts.COUNTS, *asked)]
        keys: Counter[str] = Counter()
        unasked: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        longest: dict[str, int] = {}
        for bucket in buckets:
            for operation, of in dict(bucket["unknowns"]).items():
                keys[operation] += of["keys"]
                unasked[operation] += of["unasked"]
            for operation, of in dict(bucket["waiting"]).items():
                waiting[operation] += of["keys"]
                longest[operation] = max(longest.get(operation, 0), int(of["longest"]))
        most, idle = (sorted(each, key=lambda name: (-each[name], name))[:OPERATIONS] for each in (keys, waiting))
        return StoreHealth(
            counts={
                state: min(COUNTED, sum(bucket["cards"][shelf.decode()] for bucket in buckets for shelf in shelves))
                for state, shelves in SHELVES.items()
            },
            dead=min(COUNTED, sum(bucket["dead"] for bucket in buckets)),
            oldest_unknown_seconds=max(int(bucket["born"]) for bucket in buckets) / 1e6,
            lease_over_seconds=max(0, *(int(bucket["lease"]) for bucket in buckets)) / 1e6,
            unknowns=tuple(UnknownsOf(each, keys[each], unasked[each]) for each in most),
            half_done=tuple(HalfDoneOf(each, waiting[each], longest[each] / 1e6) for each in idle),
        )
