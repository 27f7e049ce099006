"""All values of a store are written again under the current key, on every store: nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.encryption.cache import SealedEntries
from oncekey.encryption.keyring import PLAIN
from oncekey.encryption.renewal import Renewal
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.encryption.store import sealed
from oncekey.errors import ConfigurationError, StoreError, StoreUnavailable
from oncekey.stores.api import Outbox, Store
from oncekey.stores.kept_api import OPERATORS_LINE, KeptJob, KeptKey, KeptLine, KeptPage, KeptStep, Rewrite
from oncekey.stores.memory import MemoryStore
from oncekey.stores.registry import open_store
from tests.encryption.kept_rows import SCOPE, SECRET, fill, kept, raw_text, readable, reservation
from tests.encryption.rings import ring

WHY = Audit("ana", f"key 1 was in a log {SECRET}")


@pytest.fixture(
    params=[
        "memory",
        "sqlite",
        "postgres",
        pytest.param("mysql", marks=pytest.mark.stores),
        pytest.param("redis", marks=pytest.mark.stores),
        pytest.param("dynamodb", marks=pytest.mark.stores),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fixtures = {"postgres": "ready_url", "mysql": "ready_mysql", "redis": "ready_redis_url"}
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path / 'keys.db'}"
        case name:
            found: str = request.getfixturevalue(fixtures.get(name, "ready_dynamodb_url"))
            return found


@pytest.fixture
def raw(url: str) -> Iterator[Store]:
    store = open_store(url)
    store.migrate()
    yield store
    store.close()


def rotated(raw: Store, *numbers: int, **how: Any) -> Any:
    return Rotation(raw_values(raw), ring(*numbers), **how).run()


def test_rotation_puts_every_value_under_the_current_key(raw: Store, url: str) -> None:
    """Plain rows become sealed, and after that the old key is not needed: everything reads as before."""
    fill(raw, url)
    before = readable(raw, ring(2, 1))
    assert raw_text(raw).count(SECRET) >= 6

    report = rotated(raw, 2, 1, audit=WHY, page=3)

    assert report.left == Counter()
    values = 10 if isinstance(raw, Outbox) else 6  # of each prefix
    assert report.found == {PLAIN: values, 1: values, 2: values}
    assert report.rewritten == {PLAIN: values, 1: values}
    assert SECRET not in raw_text(raw)
    assert {number for row in kept(raw) for number in Renewal(ring(2))(row).current} == {2}
    assert not any(Renewal(ring(2))(row).sealed or Renewal(ring(2))(row).lost for row in kept(raw))
    assert readable(raw, ring(2)) == before


def test_second_rotation_writes_nothing(raw: Store, url: str) -> None:
    """What is under the current key is only read. So a run that was killed can be started again."""
    fill(raw, url)
    rotated(raw, 2, 1)
    before = list(kept(raw))
    report = rotated(raw, 2, 1)
    assert (report.rewritten, report.left, report.walks) == (Counter(), Counter(), 0)
    assert list(kept(raw)) == before


def test_dry_run_counts_values_by_key_and_changes_nothing(raw: Store, url: str) -> None:
    fill(raw, url)
    before = list(kept(raw))
    report = rotated(raw, 2, 1, dry_run=True, audit=WHY)
    values = 10 if isinstance(raw, Outbox) else 6
    assert report.found == {PLAIN: values, 1: values, 2: values}
    assert (report.rows, report.rewritten) == (len(before), Counter())
    assert list(kept(raw)) == before
    assert raw.audit(*OPERATORS_LINE, 10) == []


def test_value_of_a_lost_key_stays_as_it_is_and_is_reported(raw: Store, url: str) -> None:
    """All other values are written, and with the key they can be read later."""
    fill(raw, url)
    before = {row.place: row for row in kept(raw)}
    saw = readable(raw, ring(3, 2, 1))
    report = rotated(raw, 3, 2, trust_key=True)
    values = 10 if isinstance(raw, Outbox) else 6
    assert (report.lost, report.not_opened.reasons) == ({1: values}, {1: 1})
    assert report.left == {1: values - 1}  # no request needs the reason in the audit
    assert report.rewritten == {PLAIN: values, 2: values}
    for row in kept(raw):
        if row.place[-1].startswith(("one", "job-one")) or (len(row.place) > 2 and row.place[2].startswith("one")):
            assert row == before[row.place]
    assert readable(raw, ring(3, 1)) == saw


def test_rotation_leaves_a_line_in_the_audit(raw: Store) -> None:
    """It says which operator, and why; the reason is encrypted."""
    rotated(raw, 2, 1, audit=WHY, trust_key=True)
    (line,) = sealed(raw, ring(2)).audit(*OPERATORS_LINE, 10)
    assert (line.event, line.who, line.why) == ("re-encrypt", "ana", WHY.why)
    (stored,) = raw.audit(*OPERATORS_LINE, 10)
    assert SECRET not in stored.why


def test_fingerprints_are_counted_by_their_key(raw: Store, url: str) -> None:
    """Those of final rows end with their rows; the time of the others begins when they are final."""
    fill(raw, url)
    (done,) = raw.read([(SCOPE, "one-done")])
    assert done is not None
    report = rotated(raw, 2, 1)
    assert {number: (each.rows, each.unsettled) for number, each in report.fingerprints.items()} == {
        PLAIN: (4, 3),
        1: (4, 3),
        2: (4, 3),
    }
    assert report.fingerprints[1].until == pytest.approx(done.expires_at, abs=0.001)


def test_value_moved_to_another_row_is_not_rewritten(raw: Store, url: str) -> None:
    """It does not open there. Under the current key it would, so that a thief could have it moved by an operator."""
    fill(raw, url)
    rows = {row.place: row for row in kept(raw)}
    one, two = rows["key", SCOPE, "one-done"], rows["key", SCOPE, "two-done"]
    assert isinstance(one, KeptKey)
    assert isinstance(two, KeptKey)
    moved = KeptKey(
        *(SCOPE, "two-done", two.status, one.headers, one.body, one.schema_version), *(None, two.state, 0, 0.0)
    )
    assert raw_values(raw).rewrite([Rewrite(two, moved)]) == [True]
    report = rotated(raw, 2, 1)
    assert report.lost == {1: 1}
    kept_now = {row.place: row for row in kept(raw)}["key", SCOPE, "two-done"]
    assert isinstance(kept_now, KeptKey)
    assert kept_now.body == one.body


# the app, at the same time


class Busy:
    """A store whose app writes between the read of a page and the rewrite, as often as it is told to."""

    def __init__(self, inner: Any, times: int) -> None:
        self.inner, self.times = inner, times

    def kept(self, after: str, limit: int) -> KeptPage:
        page: KeptPage = self.inner.kept(after, limit)
        unknown = [row for row in page.rows if isinstance(row, KeptKey) and row.key == "one-unknown"]
        if unknown and self.times:
            self.times -= 1
            self.app_writes()
        return page

    def app_writes(self) -> None:
        app = sealed(self.inner, ring(1))  # not deployed yet: its current key is the old one
        (record,) = app.read([(SCOPE, "one-unknown")])
        assert record is not None
        change = swap(record, Event.POSTPONE, Actor.RECONCILER, reconcile_in=1.0, last_error=f"again {self.times}")
        assert app.swap([change]) != [None]

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        answers: list[bool] = self.inner.rewrite(batch)
        return answers


def test_value_that_the_app_writes_meanwhile_is_kept_and_found_by_the_next_walk(raw: Store, url: str) -> None:
    fill(raw, url)
    report = Rotation(Busy(raw, 2), ring(2, 1)).run()  # type: ignore[arg-type]
    assert (report.walks, report.left) == (2, Counter())
    (record,) = sealed(raw, ring(2)).read([(SCOPE, "one-unknown")])
    assert record is not None
    assert record.last_error == "again 0"


def test_value_that_the_app_changes_in_every_walk_is_reported(raw: Store, url: str) -> None:
    fill(raw, url)
    report = Rotation(Busy(raw, 99), ring(2, 1)).run()  # type: ignore[arg-type]
    assert (report.walks, report.changed, report.left) == (3, {1: 1}, {1: 1})
    (record,) = sealed(raw, ring(1)).read([(SCOPE, "one-unknown")])
    assert record is not None
    assert record.last_error == "again 95"


# a store in trouble, and values that oncekey did not write so


class Picky(MemoryStore):
    """It refuses a value, as a server refuses what is too long; or it is away."""

    trouble: type[StoreError] = StoreError

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        if any(isinstance(work.old, KeptKey) and work.old.key == "plain-done" for work in batch):
            raise self.trouble("no")
        return super().rewrite(batch)


def test_value_that_the_store_refuses_harms_no_other() -> None:
    raw = Picky()
    fill(raw, "memory://")
    report = rotated(raw, 2, 1)
    assert (report.refused, report.left) == ({PLAIN: 1}, {PLAIN: 1})
    assert report.rewritten == {PLAIN: 5, 1: 6}


def test_store_that_is_away_ends_the_rotation() -> None:
    raw = Picky()
    raw.trouble = StoreUnavailable
    fill(raw, "memory://")
    with pytest.raises(StoreUnavailable):
        rotated(raw, 2, 1)


def test_damaged_value_is_left_alone() -> None:
    """The rest of its row is written."""
    row = KeptKey(*("t", "k", 200, "not json", b"body", 1, "an error"), *(next(kept(_one())).state, 2, 0.0))  # type: ignore[union-attr]
    renewed = Renewal(ring(2, 1))(row)
    assert (renewed.lost, renewed.sealed) == ([PLAIN], [PLAIN])
    assert isinstance(renewed.row, KeptKey)
    assert (renewed.row.headers, renewed.row.body) == ("not json", b"body")
    job = KeptJob("j", "t", "k", b"oncekey-sealed:!", "the worker's lease ran out", b"no json")
    renewed = Renewal(ring(2, 1))(job)
    assert (renewed.row, renewed.lost, renewed.sealed) == (job, [PLAIN, PLAIN], [])


def test_response_of_a_newer_version_is_left_alone() -> None:
    row = KeptKey(*("t", "k", 200, "[]", b"body", 9, None), *(next(kept(_one())).state, 2, 0.0))  # type: ignore[union-attr]
    renewed = Renewal(ring(2, 1))(row)
    assert (renewed.row, renewed.lost, renewed.sealed) == (row, [], [])


def test_reason_for_an_accepted_loss_keeps_the_words_of_the_store() -> None:
    """Redis writes how many buckets were lost before the reason."""
    values = sealed(MemoryStore(), ring(1)).values  # type: ignore[attr-defined]
    why = values.sealed_audit(Audit("ana", "fire"), ("accept_loss",)).why
    line = KeptLine("", "oncekey:epoch", "1", "accept_loss", f"3 of 16 buckets: {why}")
    renewed = Renewal(ring(2, 1))(line)
    assert renewed.sealed == [1]
    assert isinstance(renewed.row, KeptLine)
    words, _, text = renewed.row.why.rpartition(" ")
    assert words == "3 of 16 buckets:"
    assert sealed(MemoryStore(), ring(2)).values.opened_text(text, ("accept_loss",), "why") == "fire"  # type: ignore[attr-defined]


def test_store_that_cannot_hand_out_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="KeptValues"):
        raw_values(object())


def test_cached_answer_under_a_removed_key_is_not_used() -> None:
    """The store has the answer under the current key, and the cache would replay it without its body."""
    raw = MemoryStore()
    fill(raw, "memory://")
    (record,) = sealed(raw, ring(1)).read([(SCOPE, "one-done")])
    assert record is not None
    entry = SealedEntries(ring(1), b"s" * 32, 60.0).seal(b"name", record, record.now)
    assert entry is not None
    for numbers, found in (((2, 1), record.response), ((2,), None)):
        opened = SealedEntries(ring(*numbers), b"s" * 32, 60.0).open(b"name", SCOPE, "one-done", entry, record.now)
        assert (opened and opened.response) == found


def test_step_of_another_name_does_not_open() -> None:
    """A result is bound to its step."""
    result = sealed(MemoryStore(), ring(1)).values.sealed_json(b"1", ("t", "k"), "result:a")  # type: ignore[attr-defined]
    assert Renewal(ring(2, 1))(KeptStep("t", "k", "a", result)).sealed == [1]
    assert Renewal(ring(2, 1))(KeptStep("t", "k", "b", result)).lost == [1]


def _one() -> MemoryStore:
    store = MemoryStore()
    store.reserve([reservation("one")])
    return store


def test_answer_that_this_process_cannot_open_is_not_put_into_the_cache() -> None:
    """Another process may open it: an entry of this one would hide the answer from it."""
    raw = MemoryStore()
    fill(raw, "memory://")
    (record,) = sealed(raw, ring(2)).read([(SCOPE, "one-done")])
    assert record is not None
    assert SealedEntries(ring(2), b"s" * 32, 60.0).seal(b"name", record, record.now) is None
