"""The ring has another key under the current number than the app has: a typing error, or a number that two keys had."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event, State
from oncekey.encryption import Keyring
from oncekey.encryption.fingerprints import KeyedFingerprints
from oncekey.encryption.renewal import Renewal
from oncekey.encryption.rotation import Rotation, has_another_secret, raw_values
from oncekey.encryption.store import sealed
from oncekey.stores.api import Store
from oncekey.stores.kept_api import OPERATORS_LINE, KeptKey, KeptPage, Rewrite
from oncekey.stores.memory import MemoryStore
from tests.cli.key_table import RESPONSE, KeyTable, Run, runner
from tests.cli.test_re_encrypt import entry
from tests.encryption.kept_rows import SCOPE, fill, kept, put, reservation
from tests.encryption.rings import ONE, THREE, ring

WRONG = Keyring({2: THREE, 1: ONE})
SURE = ("--yes", "--why", "key 1 is old", "--who", "ana")


@pytest.fixture
def table(tmp_path: Path) -> KeyTable:
    return KeyTable(f"sqlite:///{tmp_path / 'keys.db'}")


@pytest.fixture
def operate(table: KeyTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    keys = ",".join(f"{number}:{base64.b64encode(key).decode()}" for number, key in ((2, THREE), (1, ONE)))
    monkeypatch.setenv("ONCEKEY_KEYS", keys)
    return runner(table.url, monkeypatch, capsys)


def values_under_two(table: KeyTable, keyring: Keyring, *keys: str) -> None:
    """Finished requests, as an app with this keyring writes them."""
    raw = table.store
    for key in keys:
        record = raw.reserve([KeyedFingerprints(keyring)(reservation(key))])[0].record
        assert record is not None
        table.store = sealed(raw, keyring)  # type: ignore[assignment]
        table.move(record, Event.COMPLETE, response=RESPONSE)
        table.store = raw


def test_value_that_the_current_key_does_not_open_is_reported(table: KeyTable, operate: Run) -> None:
    """FOUND alone would say that all is well, and the operator would throw the right key away."""
    fill(table.store, table.url)
    before = list(kept(table.store))

    code, out, _ = operate("keys", "re-encrypt", *SURE)

    assert code == 1
    assert out.splitlines()[2].split()[:7] == ["2,", "current", "10", "0", "0", "10", "0"]
    assert "nothing was written: key 2 opens 0 of the 9 values that name it" in out
    assert "key 2 of this keyring is not the key 2 that wrote 9 values, and does not open them" in out
    assert "key 2 does not open 1 reason in the audit" in out
    assert re.search(r"key 1 is needed at least until \S+: 10 values are under it, and 4 rows have", out)
    assert "add --trust-key" not in out, "such a key is never taken"
    assert list(kept(table.store)) == before, "the line of the audit would be under the wrong key too"


@pytest.mark.parametrize("option", [(), ("--trust-key",)])
def test_key_that_opens_no_value_is_never_taken(table: KeyTable, operate: Run, option: tuple[str, ...]) -> None:
    fill(table.store, table.url)
    before = list(kept(table.store))
    assert operate("keys", "re-encrypt", *option, *SURE)[0] == 1
    assert list(kept(table.store)) == before


def test_key_that_opens_some_of_its_values_is_not_taken_for_the_right_one(table: KeyTable, operate: Run) -> None:
    """One process with the wrong ring has written two rows: they open, and prove nothing."""
    fill(table.store, table.url)
    values_under_two(table, WRONG, "of-the-wrong-two", "of-the-wrong-two-again")
    before = list(kept(table.store))

    code, out, _ = operate("keys", "re-encrypt", *SURE)

    assert code == 1
    assert "nothing was written: key 2 opens 2 of the 11 values that name it" in out
    assert "Some were written by another key 2, so processes of the app have different keyrings" in out
    assert "If key 2 of this keyring is right, add --trust-key: what does not open stays as it is" in out
    assert list(kept(table.store)) == before
    told = json.loads(operate("keys", "re-encrypt", "--json", *SURE)[1])
    assert (told["stopped"], told["current_proven"], told["keys"]["1"]["left"]) == (True, False, 10)
    assert list(kept(table.store)) == before


def test_dry_run_says_what_a_run_would_not_write(table: KeyTable, operate: Run) -> None:
    fill(table.store, table.url)
    values_under_two(table, WRONG, "of-the-wrong-two")
    out = operate("keys", "re-encrypt", "--dry-run")[1]
    assert "without --dry-run, nothing would be written: key 2 opens 1 of the 10 values" in out
    assert json.loads(operate("keys", "re-encrypt", "--dry-run", "--json")[1])["stopped"] is False


def test_key_without_any_value_is_not_proven(table: KeyTable, operate: Run) -> None:
    """The app may have another key 2, and has answered no request under it yet."""
    put(sealed(table.store, ring(1)), "one", version=258)
    before = list(kept(table.store))
    code, out, _ = operate("keys", "re-encrypt", *SURE)
    assert (code, list(kept(table.store))) == (1, before)
    assert "nothing was written: no value of the app is under key 2 yet, so nothing shows that this is the app's" in out
    assert "or add --trust-key, if you are sure" in out

    assert operate("keys", "re-encrypt", "--trust-key", *SURE)[0] == 0
    assert readable_in(table.store, WRONG) == [True] * 7


def test_reason_in_the_audit_proves_no_key(table: KeyTable, operate: Run) -> None:
    """A command of the same operator has written it, with the same wrong ring."""
    fill(table.store, table.url)
    why = sealed(table.store, WRONG).values.sealed_audit(Audit("ana", "paid"), (SCOPE, "one-unknown"))  # type: ignore[attr-defined]
    record = table.there("one-unknown", SCOPE)
    assert record is not None
    table.move(record, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=why)
    code, out, _ = operate("keys", "re-encrypt", *SURE)
    assert (code, "key 2 opens 0 of the 9 values that name it" in out) == (1, True)


def test_reason_under_another_key_stops_no_later_rotation(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version wrote its own line under the wrong key. Nothing but that reason is lost by it."""
    fill(table.store, table.url)
    raw_values(table.store).note_walk("re-encrypt", "key 2", _sealed_reason(WRONG))
    monkeypatch.setenv("ONCEKEY_KEYS", entry(2, 1))
    code, out, _ = operate("keys", "re-encrypt", *SURE)
    assert code == 0
    assert "key 2 does not open 1 reason in the audit. No request needs that, and it stays as it is" in out
    assert "key 2 of this keyring is not the key 2" not in out


def _sealed_reason(keyring: Keyring) -> Audit:
    sealed_reason: Audit = sealed(MemoryStore(), keyring).values.sealed_audit(Audit("ana", "x"), OPERATORS_LINE)  # type: ignore[attr-defined]
    return sealed_reason


def readable_in(store: Store, keyring: Keyring) -> list[bool]:
    """For each row with a value, whether all its values are under the current key of this ring, which opens them."""
    found = [Renewal(keyring)(row) for row in kept(store)]
    return [bool(each.current and not each.sealed and not each.lost) for each in found if each.current or each.lost]


def test_dry_run_says_so_too(table: KeyTable, operate: Run) -> None:
    fill(table.store, table.url)
    code, out, _ = operate("keys", "re-encrypt", "--dry-run", "--json")
    of_two = json.loads(out)["keys"]["2"]
    assert (code, of_two["found"], of_two["not_opened"], of_two["another_secret"]) == (1, 10, 10, True)


def test_fingerprint_tells_another_key_from_a_value_that_was_changed(table: KeyTable) -> None:
    """The app wrote under both keys of one number, so that some values open: the rows say which did not write them."""
    values_under_two(table, ring(2), "of-two")
    values_under_two(table, WRONG, "of-the-wrong-two")
    report = Rotation(raw_values(table.store), ring(2), dry_run=True).run()
    assert (report.lost, report.opened) == ({2: 1}, {2: 1})
    assert has_another_secret(ring(2), report, table.store, 2)

    _swap_bodies(table.store)
    report = Rotation(raw_values(table.store), ring(2), dry_run=True).run()
    report.doubted[2] = [(SCOPE, "of-two")]
    assert report.lost == {2: 2}
    assert not has_another_secret(ring(2), report, table.store, 2)


def test_damaged_value_stops_the_rotation_until_the_operator_trusts_the_key() -> None:
    raw = MemoryStore()
    fill(raw, "memory://")
    rows = {row.place: row for row in kept(raw)}
    first = next(row for row in rows.values() if isinstance(row, KeptKey) and row.key == "one-done")
    two = next(row for row in rows.values() if isinstance(row, KeptKey) and row.key == "two-done")
    moved = KeptKey(
        *(SCOPE, "one-done", 201, two.headers, two.body, two.schema_version, None), *(State.COMPLETED, 258, 0.0)
    )
    assert raw.rewrite([Rewrite(first, moved)]) == [True]
    before = list(kept(raw))
    report = Rotation(raw, ring(2, 1), page=1).run()
    assert (report.opened[2], report.unopened, report.walks, report.rewritten.total()) == (5, 1, 0, 0)
    assert list(kept(raw)) == before

    report = Rotation(raw, ring(2, 1), trust_key=True, page=1).run()
    assert (report.lost, report.left, report.walks) == ({2: 1}, {2: 1}, 1)
    assert report.rewritten == {0: 6, 1: 5}


class Deployed:
    """A store whose app gets a process with another ring, after so many pages were read."""

    def __init__(self, inner: MemoryStore, pages: int, keyring: Keyring) -> None:
        self.inner, self.pages, self.keyring = inner, pages, keyring
        self.rewritten: list[str] = []

    def kept(self, after: str, limit: int) -> KeptPage:
        self.pages -= 1
        if self.pages == 0:
            put(sealed(self.inner, self.keyring), "a-late", version=514)
        return self.inner.kept(after, limit)

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        self.rewritten += [work.old.place[2] for work in batch]
        return self.inner.rewrite(batch)


def test_nothing_is_written_before_all_rows_are_read() -> None:
    """The first value opens, because one process has the wrong ring. The values that do not open come last."""
    raw = MemoryStore()
    put(sealed(raw, WRONG), "a-wrong", version=514)
    fill(raw, "memory://")
    before = list(kept(raw))
    report = Rotation(raw, WRONG, audit=Audit("ana", "x"), page=1).run()
    assert (report.opened[2] > 0, report.unopened > 0, report.walks) == (True, True, 0)
    assert list(kept(raw)) == before


@pytest.mark.parametrize("trust_key", [False, True])
def test_rotation_stops_when_a_process_with_another_key_appears_while_it_writes(trust_key: bool) -> None:
    raw = MemoryStore()
    fill(raw, "memory://")
    pages = sum(1 for _ in kept(raw, 1))
    store = Deployed(raw, pages + 1, Keyring({2: THREE}))
    report = Rotation(store, ring(2, 1), trust_key=trust_key, page=1).run()  # type: ignore[arg-type]
    assert (report.walks, report.unopened > 0) == (1, True)
    assert bool(store.rewritten) == trust_key
    assert (report.waiting.total() == 0) == trust_key


def _swap_bodies(store: Store) -> None:
    values = raw_values(store)
    rows = {row.place[2]: row for row in values.kept("", 10).rows}
    one, other = rows["of-two"], rows["of-the-wrong-two"]
    assert isinstance(one, KeptKey)
    assert isinstance(other, KeptKey)
    changed = KeptKey(
        *(one.scope, one.key, one.status, one.headers, other.body, one.schema_version, one.last_error),
        *(one.state, one.fingerprint_version, one.expires_at),
    )
    assert values.rewrite([Rewrite(one, changed)]) == [True]
