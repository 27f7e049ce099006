"""Random moves against two stores at once: the one under test, and the dictionary that says what is right.

Every step is made on both, every answer and every row is compared. Another store joins with a subclass of
``StoresAgree`` that says how to make it; one that keeps its own clock sets ``exact = False`` and overrides ``tick``.
All times lie on a wide grid, so that the seconds that really pass on such a clock, on a busy machine, decide nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oncekey.core.audit import Audit
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import FENCES, FINAL, STARTS, TABLE, Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.errors import IllegalTransition
from oncekey.stores.api import Duty, Store
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.store_suite import Clock

KEYS = list(product(["tenant", "Tenant"], ["a", "b", "c"]))
GRID = 100.0
SECONDS = st.sampled_from([0.0, 1.0, 2.0, 5.0, 20.0]).map(lambda number: number * GRID)
RESPONSES = st.builds(
    StoredResponse,
    st.integers(100, 599),
    st.lists(st.tuples(st.text("abc-", min_size=1), st.text(st.characters(exclude_categories=["Cs", "Cc"])))).map(
        tuple
    ),
    st.none() | st.binary(max_size=40),
)
IDS = st.none() | st.sampled_from(["x", "X", "é"])
STEPS = st.builds(
    Step,
    st.sampled_from(["b", "a", "Ä"]),
    st.sampled_from(list(StepKind)),
    st.sampled_from(list(StepState)),
    st.booleans(),
    st.none() | st.sampled_from([b"null", b'{"id": "\xc3\xa9"}']),
    IDS,
    IDS,
)
AUDITS = st.builds(
    Audit, st.sampled_from(["ana", "reconciler"]), st.text(st.characters(exclude_categories=["Cs", "Cc"]))
)
WORDS = st.none() | st.sampled_from(["charge_created", "Ünïcödé '%_"])

TIMES = ("lease_until", "reconcile_at", "created_at", "finished_at", "expires_at")


class StoresAgree(RuleBasedStateMachine):
    exact: ClassVar[bool] = True
    """False: the store's clock is its own, so times are compared with a tolerance, and ties have no order."""

    def make_store(self, clock: Callable[[], float]) -> Store:
        raise NotImplementedError

    def make_model(self, clock: Callable[[], float]) -> MemoryStore:
        return MemoryStore(clock)

    def tick(self, seconds: float) -> None:
        """Let time pass for every row of the store under test; ``self.clock`` moves anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.model = self.make_model(self.clock)
        self.store = self.make_store(self.clock)
        self.store.migrate()
        self.numbers = 0
        self.seen: list[tuple[Record, Record]] = []  # the same row, as the store and as the model showed it

    def teardown(self) -> None:
        self.store.close()

    # steps

    @initialize(data=st.data())
    def all_keys_begin(self, data: st.DataObject) -> None:
        self.reserve(data, KEYS)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    def reserve(self, data: st.DataObject, keys: list[tuple[str, str]]) -> None:
        wanted = [self._reservation(data, *at) for at in keys]
        pairs = zip(self.store.reserve(wanted), self.model.reserve(wanted), strict=True)
        for mine, right in pairs:
            self._same(mine.record, right.record)

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Moves of the table, from rows as they are or as they were: the stale ones must be refused by both."""
        drawn = data.draw(st.lists(st.sampled_from(self.seen[-40:]), min_size=2, max_size=6))
        by_key = {(mine.scope, mine.key): (mine, right) for mine, right in drawn}
        changes = [self._spoiled(data, change) for pair in by_key.values() if (change := self._change(data, *pair))]
        mine = self.store.swap(changes)
        right = self.model.swap(changes)
        for mine_row, right_row in zip(mine, right, strict=True):
            self._same(mine_row, right_row)

    more_swaps = rule(data=st.data())(lambda self, data: self.swap(data))  # most of a row's life

    @rule(seconds=st.sampled_from([1.0, 2.0, 6.0, 20.0]).map(lambda number: number * GRID))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.tick(seconds)

    @rule(limit=st.integers(1, 4), expired_state_only=st.booleans())
    def purge(self, limit: int, expired_state_only: bool) -> None:
        if not self.exact:
            limit = 100  # which of two that expired together goes first is not defined
        mine, right = (store.purge(limit, expired_state_only=expired_state_only) for store in (self.store, self.model))
        assert mine == right

    @rule(duty=st.sampled_from(list(Duty)), limit=st.integers(1, 4))
    def due(self, duty: Duty, limit: int) -> None:
        mine, right = self.store.due(duty, limit), self.model.due(duty, limit)
        assert len(mine) == len(right)
        if self.exact:
            for pair in zip(mine, right, strict=True):
                self._same(*pair)
        else:
            mine, right = self.store.due(duty, 100), self.model.due(duty, 100)
            assert {(row.scope, row.key) for row in mine} == {(row.scope, row.key) for row in right}

    @rule(
        state=st.none() | st.sampled_from(list(State)),
        scope=st.none() | st.sampled_from(["tenant", "Tenant", "stranger"]),
        operation=st.none() | st.integers(1, 12).map(lambda number: f"POST /{number}"),
        older_than=st.none() | SECONDS.map(lambda seconds: seconds + GRID / 2),  # between the points of the grid
        limit=st.integers(1, 4),
        after=st.none() | st.sampled_from(KEYS),
    )
    def listing(
        self,
        state: State | None,
        scope: str | None,
        operation: str | None,
        older_than: float | None,
        limit: int,
        after: tuple[str, str] | None,
    ) -> None:
        asked = (state, scope, operation, older_than, limit, after)
        for pair in zip(self.store.listing(*asked), self.model.listing(*asked), strict=True):
            self._same(*pair)

    @rule(downstream_key=IDS, provider_id=IDS)
    def find(self, downstream_key: str | None, provider_id: str | None) -> None:
        asked = {"downstream_key": downstream_key, "provider_id": provider_id}
        assert self.store.find(**asked) == self.model.find(**asked)

    @rule()
    def counts(self) -> None:
        mine, right = self.store.counts(), self.model.counts()
        assert (mine.counts, mine.dead) == (right.counts, right.dead)
        tolerance = 0 if self.exact else GRID / 2
        assert mine.oldest_unknown_seconds == pytest.approx(right.oldest_unknown_seconds, abs=tolerance)
        assert mine.lease_over_seconds == pytest.approx(right.lease_over_seconds, abs=tolerance)

    @invariant()
    def all_rows_agree(self) -> None:
        for pair in zip(self.store.read(KEYS), self.model.read(KEYS), strict=True):
            self._same(*pair)

    @invariant()
    def all_that_stands_beside_agrees(self) -> None:
        asked = [StepsOf(*at) for at in KEYS]
        assert self.store.steps(asked) == self.model.steps(asked)
        for scope, key in KEYS:
            mine, right = (store.audit(scope, key, 50) for store in (self.store, self.model))
            if not self.exact:
                mine, right = ([replace(line, at=0.0) for line in lines] for lines in (mine, right))
            assert mine == right

    # parts

    def _reservation(self, data: st.DataObject, scope: str, key: str) -> Reservation:
        self.numbers += 1
        return Reservation(
            scope=scope,
            key=key,
            operation=f"POST /{self.numbers}",
            fingerprint=self.numbers.to_bytes(32, "big"),
            fingerprint_version=data.draw(st.integers(1, 2)),
            effects=data.draw(st.sampled_from(list(Effects))),
            owner=f"owner-{self.numbers}",
            lease_seconds=data.draw(SECONDS),
            retention_seconds=data.draw(SECONDS) * 4,
            quarantine_seconds=data.draw(st.none() | SECONDS),
        )

    def _change(self, data: st.DataObject, mine: Record, right: Record) -> Swap | None:
        moves = [(row, actor) for row in TABLE if row.source is mine.state for actor in sorted(row.by)]
        row, actor = data.draw(st.sampled_from(moves))
        starts = row.event in STARTS
        settings: dict[str, Any] = {
            "to_state": row.target,
            "reservation": self._reservation(data, mine.scope, mine.key) if starts else None,
            "lease_seconds": data.draw(st.none() | SECONDS),
            "response": data.draw(st.none() | RESPONSES),
            "last_error": data.draw(WORDS),
            "recovery_point": data.draw(WORDS) if row.event is Event.ADVANCE else None,
            "quarantine_seconds": data.draw(st.none() | SECONDS),
            "reconcile_in": data.draw(st.none() | SECONDS) if actor is not Actor.REQUEST else None,
            "audit": data.draw(st.none() | AUDITS),
            "step": None if starts or row.target in (None, State.EXPIRED) else data.draw(st.none() | STEPS),
        }
        if row.event in FENCES:
            settings["step"] = data.draw(STEPS)
            settings["effects"] = data.draw(st.none() | st.sampled_from(list(Effects)))
            settings["recovery_point"] = data.draw(WORDS)
            settings["new_owner"] = f"settled-{self.numbers}"
        try:
            change = swap(mine, row.event, actor, **settings)
        except IllegalTransition:
            return None  # the table has a condition that this row does not meet
        assert change == swap(right, row.event, actor, **settings)
        return change

    def _spoiled(self, data: st.DataObject, change: Swap) -> Swap:
        """Now and then not what the mover saw: both must refuse."""
        match data.draw(st.sampled_from(["", "", "", "", "owner", "state"])):
            case "owner":
                return replace(change, owner=data.draw(st.sampled_from(self.seen))[0].owner)
            case "state":
                return replace(change, from_state=data.draw(st.sampled_from(list(State))))
        return change

    def _same(self, mine: Record | None, right: Record | None) -> None:
        if mine is None or right is None:
            assert mine is right
            return
        if self.exact:
            assert mine == right
        else:
            blank: dict[str, Any] = dict.fromkeys((*TIMES, "now"), 0.0)
            assert replace(mine, **blank) == replace(right, **blank)
            for name in TIMES:
                mine_time, right_time = getattr(mine, name), getattr(right, name)
                assert (mine_time is None) == (right_time is None)
                # As the mover saw them, which may be before the row was aged from outside: its beginning and, once it
                # is final, the lease that no longer matters.
                as_seen = name == "created_at" or (name == "lease_until" and mine.state in FINAL)
                if mine_time is not None and not as_seen:
                    assert mine_time - mine.now == pytest.approx(right_time - right.now, abs=GRID / 2)
        self.seen.append((mine, right))


class SqliteAgrees(StoresAgree):
    def make_store(self, clock: Callable[[], float]) -> Store:
        memory = Path("/dev/shm")  # noqa: S108 - an fsync there costs nothing: these runs are about meaning
        self.folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        return SqliteStore(Path(self.folder.name) / "keys.db", clock=clock)

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


# A run takes seconds; the limit is for a failure, which hypothesis takes up to five minutes to make short.
TestSqliteAgrees = pytest.mark.timeout(400)(SqliteAgrees.TestCase)
TestSqliteAgrees.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
