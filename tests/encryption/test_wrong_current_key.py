"""The ring has another key under the current number than the app has: a typing error, or a number that two keys had."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from oncekey.core.states import Event, State
from oncekey.encryption import Keyring
from oncekey.encryption.fingerprints import KeyedFingerprints
from oncekey.encryption.rotation import Rotation, has_another_secret, raw_values
from oncekey.encryption.store import sealed
from oncekey.stores.api import Store
from oncekey.stores.kept_api import KeptKey, Rewrite
from oncekey.stores.memory import MemoryStore
from tests.cli.key_table import RESPONSE, KeyTable, Run, runner
from tests.encryption.kept_rows import SCOPE, fill, kept, reservation
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


def test_value_that_the_current_key_does_not_open_is_reported(table: KeyTable, operate: Run) -> None:
    """FOUND alone would say that all is well, and the operator would throw the right key away."""
    fill(table.store, table.url)
    before = list(kept(table.store))

    code, out, _ = operate("keys", "re-encrypt", *SURE)

    assert code == 1
    assert out.splitlines()[2].split()[:7] == ["2,", "current", "11", "0", "0", "10", "0"]
    assert "key 2 of this keyring is not the key 2 that wrote 10 values: they do not open" in out
    assert "key 1 is needed: 10 values are under it" in out
    lines = [row for row in kept(table.store) if row not in before]
    assert [row.place[2] for row in lines] == ["oncekey:re-encrypt"]


def test_dry_run_says_so_too(table: KeyTable, operate: Run) -> None:
    fill(table.store, table.url)
    code, out, _ = operate("keys", "re-encrypt", "--dry-run", "--json")
    of_two = json.loads(out)["keys"]["2"]
    assert (code, of_two["found"], of_two["not_opened"], of_two["another_secret"]) == (1, 10, 10, True)


def test_fingerprint_tells_another_key_from_a_value_that_was_changed(table: KeyTable) -> None:
    """The app wrote under both keys of one number, so that some values open: the rows say which did not write them."""
    for keyring, key in ((ring(2), "of-two"), (WRONG, "of-the-wrong-two")):
        reserved = KeyedFingerprints(keyring)(reservation(key))
        record = table.store.reserve([reserved])[0].record
        assert record is not None
        own = sealed(table.store, keyring)
        raw, table.store = table.store, own  # type: ignore[assignment]
        table.move(record, Event.COMPLETE, response=RESPONSE)
        table.store = raw
    report = Rotation(raw_values(table.store), ring(2), dry_run=True).run()
    assert (report.lost, report.opened) == ({2: 1}, {2: 1})
    assert has_another_secret(ring(2), report, table.store, 2)

    _swap_bodies(table.store)
    report = Rotation(raw_values(table.store), ring(2), dry_run=True).run()
    report.doubted[2] = [(SCOPE, "of-two")]
    assert report.lost == {2: 2}
    assert not has_another_secret(ring(2), report, table.store, 2)


def test_first_value_that_was_changed_stops_no_rotation() -> None:
    """Once the current key has opened a value, it is the right one: the next walk writes what this one left."""
    raw = MemoryStore()
    fill(raw, "memory://")
    rows = {row.place: row for row in kept(raw)}
    first = next(row for row in rows.values() if isinstance(row, KeptKey) and row.key == "one-done")
    two = next(row for row in rows.values() if isinstance(row, KeptKey) and row.key == "two-done")
    moved = KeptKey(
        *(SCOPE, "one-done", 201, two.headers, two.body, two.schema_version, None), *(State.COMPLETED, 258, 0.0)
    )
    assert raw.rewrite([Rewrite(first, moved)]) == [True]
    report = Rotation(raw, ring(2, 1), page=1).run()
    assert (report.lost, report.left) == ({2: 1}, {2: 1})
    assert (report.walks, report.wrong_current) == (2, False)


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
