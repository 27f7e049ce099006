"""The line ``encryption`` of ``oncekey doctor``, with the app's keyring, without it, and with another one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from oncekey.admin import encryption
from oncekey.admin.doctor import examine
from oncekey.core.audit import Audit
from oncekey.core.states import State
from oncekey.encryption import Keyring
from oncekey.encryption.rotation import raw_values
from oncekey.encryption.store import sealed
from oncekey.stores.kept_api import OPERATORS_LINE
from oncekey.stores.memory import MemoryStore
from tests.cli.key_table import KeyTable, Run
from tests.cli.test_re_encrypt import entry
from tests.encryption.kept_rows import fill, kept, put
from tests.encryption.rings import THREE, ring


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    return lambda *numbers: monkeypatch.setenv("ONCEKEY_KEYS", entry(*numbers))


def lines(operate: Run) -> list[tuple[str, str, str]]:
    checks = json.loads(operate("doctor", "--json")[1])["checks"]
    return [(each["level"], each["found"], each["advice"] or "") for each in checks if each["check"] == "encryption"]


def line(operate: Run) -> tuple[str, str, str]:
    (found,) = lines(operate)
    return found


def test_store_without_encryption_is_ok(table: KeyTable, operate: Run, keys: Any) -> None:
    table.put("order-1-of-today", State.COMPLETED)
    words = "in the only row: no value is encrypted, and no keyring is given"
    assert line(operate) == ("ok", words, "")


def test_values_that_open_are_counted_by_key(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    put(sealed(table.store, ring(1)), "one", version=258)
    put(sealed(table.store, ring(2, 1)), "two", version=514)
    keys(2, 1)
    level, found, advice = line(operate)
    assert (level, advice) == ("ok", "")
    assert found.startswith(
        "in all 14 rows: all values are encrypted, and open: 6 under key 2, 6 under key 1; key 2 is current"
    )


def test_values_without_a_keyring_are_a_warning_that_names_the_variable(
    table: KeyTable, operate: Run, keys: Any
) -> None:
    fill(table.store, table.url)
    level, found, advice = line(operate)
    assert level == "warn"
    assert ": keys 1, 2 are in use, and this command has no keyring" in found
    assert advice.startswith("set ONCEKEY_KEYS to the keyring of the app")


@pytest.mark.parametrize("kind", ["steps", "audit", "outbox"])
def test_values_of_every_kind_show_their_key(table: KeyTable, operate: Run, keys: Any, kind: str) -> None:
    fill(table.store, table.url)
    rows = {"steps": "KeptStep", "audit": "KeptLine", "outbox": "KeptJob"}[kind]
    found = [encryption.numbers_in(row) for row in kept(table.store) if type(row).__name__ == rows]
    assert sorted({number for numbers in found for number in numbers}) == [1, 2]


def test_key_that_is_not_in_the_keyring_is_broken(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    put(sealed(table.store, ring(1)), "one", version=258)
    keys(2)
    level, found, advice = line(operate)
    assert level == "fail"
    assert found.startswith("in all 7 rows: key 1 is in use, and not in the keyring")
    assert advice == "add key 1 to the keyring of every process"


def test_key_of_a_fingerprint_alone_is_missed_too(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    """All values are under key 2 already: retries of these rows would get 503."""
    put(sealed(table.store, ring(2)), "two", version=258)
    keys(2)
    assert line(operate)[::2] == ("fail", "add key 1 to the keyring of every process")


def test_key_that_does_not_open_its_values_is_broken(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(sealed(table.store, ring(1)), "one", version=258)
    monkeypatch.setenv("ONCEKEY_KEYS", f"1:{base64.b64encode(THREE).decode()}")
    level, found, advice = line(operate)
    assert level == "fail"
    assert found.endswith(": key 1 of this keyring does not open 5 values that name it, and opens none")
    assert "oncekey keys re-encrypt --dry-run" in advice


def test_damaged_value_is_broken_and_names_no_key(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    put(sealed(table.store, ring(1)), "one", version=258)
    table.execute("UPDATE idempotency_keys SET last_error = 'oncekey-sealed:' WHERE key = 'one-half'")
    keys(1)
    assert line(operate)[:2] == ("fail", "in all 7 rows: damaged: 1 value")


def test_plain_values_beside_a_keyring_are_a_warning(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    table.put("order-1-of-today", State.COMPLETED)
    keys(1)
    level, found, advice = line(operate)
    assert level == "warn"
    assert found.startswith("in the only row: not encrypted: 1 value, from before")
    assert "then run `oncekey keys re-encrypt`" in advice


def test_keyring_on_an_empty_store_is_ok(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    keys(1)
    assert line(operate)[:2] == ("ok", "no rows yet: no value yet; key 1 is current")


def test_key_that_only_an_expired_row_names_is_not_missed(
    table: KeyTable, operate: Run, keys: Callable[..., None]
) -> None:
    """A request starts it over without a comparison, and `re-encrypt --dry-run` says that its key is not needed."""
    put(sealed(table.store, ring(2)), "two", version=514)
    table.execute("UPDATE idempotency_keys SET fingerprint_version = 258, state = 'expired' WHERE key = 'two-done'")
    keys(2)
    assert line(operate)[0] == "ok"
    table.execute("UPDATE idempotency_keys SET state = 'completed' WHERE key = 'two-done'")
    assert line(operate)[0] == "fail"


# -- a keyring that does not encrypt -------------------------------------------------------------------------------


def test_keyring_that_does_not_encrypt_is_a_warning_that_says_how_to_go_on(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.put("order-1-of-today", State.COMPLETED)
    monkeypatch.setenv("ONCEKEY_KEYS", f"plain,{entry(1)}")
    level, found, advice = line(operate)
    assert level == "warn"
    assert found == "in the only row: the keyring does not encrypt (plain), and opens: 1 value not encrypted"
    assert "take plain out of the keyring" in advice
    assert "oncekey keys re-encrypt --decrypt" in advice
    put(sealed(table.store, ring(1)), "one", version=258)
    assert line(operate)[1].endswith("opens: 1 value not encrypted, 6 under key 1")
    monkeypatch.setenv("ONCEKEY_KEYS", f"plain,{entry(2)}")
    missing, plain = lines(operate)
    assert missing[::2] == ("fail", "add key 1 to the keyring of every process")
    assert "the keyring does not encrypt (plain)" in plain[1]


def test_key_that_is_declared_lost_is_a_warning_while_rows_are_under_it(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(sealed(table.store, ring(2)), "two", version=514)
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(2)},1:lost")
    assert line(operate)[0] == "ok"
    put(sealed(table.store, ring(1)), "one", version=258)
    level, found, _ = line(operate)
    assert (level, ": key 1 is declared lost, and in use: retries of such finished requests get 410" in found) == (
        "warn",
        True,
    )
    put(sealed(table.store, ring(3)), "three", version=770)
    missing, lost = lines(operate)
    assert missing[::2] == ("fail", "add key 3 to the keyring of every process")
    assert (lost[0], "key 1 is declared lost" in lost[1]) == ("warn", True)


def test_each_thing_that_is_wrong_has_a_line_and_the_worst_is_first(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named the missing key 3 alone, and not the key 2 that opens nothing."""
    put(sealed(table.store, ring(2)), "two", version=514)
    put(sealed(table.store, ring(3)), "three", version=770)
    put(table.store, "plain")
    table.execute("UPDATE idempotency_keys SET last_error = 'oncekey-sealed:' WHERE key = 'two-half'")
    monkeypatch.setenv("ONCEKEY_KEYS", entry(1).replace("1:", "2:", 1))
    found = lines(operate)
    assert [level for level, _, _ in found] == ["fail", "fail", "fail", "warn"]
    damaged, wrong, missing, plain = (words.removeprefix("in all 21 rows: ") for _, words, _ in found)
    assert damaged == "damaged: 1 value"
    assert wrong == "key 2 of this keyring does not open 4 values that name it, and opens none"
    assert missing.startswith("key 3 is in use, and not in the keyring: retries of such rows get 503")
    assert plain.startswith("not encrypted: 6 values")
    assert operate("doctor")[0] == 2


# -- what no request needs -----------------------------------------------------------------------------------------


def only_the_audit_and_jobs_are_left(table: KeyTable, prefix: str) -> None:
    for name in ("keys", "steps"):
        table.execute(f"DELETE FROM idempotency_{name} WHERE key LIKE '{prefix}-%'")


def test_reason_in_the_audit_alone_is_a_warning_whether_its_key_is_declared_lost_or_not(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit is kept for 400 days. No retry and no worker needs it."""
    put(sealed(table.store, ring(2)), "two", version=514)
    put(sealed(table.store, ring(1)), "one", version=258)
    only_the_audit_and_jobs_are_left(table, "one")
    words = "in all 8 rows: this cannot be read, and no request needs it: 1 reason in the audit (key 1)"
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(2)},1:lost")
    assert line(operate) == ("warn", words, "take the entry of key 1 out of the keyring: no request needs it")
    monkeypatch.setenv("ONCEKEY_KEYS", entry(2))
    level, found, advice = line(operate)
    assert (level, found) == ("warn", words)
    assert advice.startswith("add the key that wrote it, if you have it. Otherwise there is nothing to do")


def test_reason_under_another_key_of_a_number_in_use_is_a_warning(
    table: KeyTable, operate: Run, keys: Callable[..., None]
) -> None:
    put(sealed(table.store, ring(2)), "two", version=514)
    why = sealed(table.store, Keyring({2: THREE})).values.sealed_audit(Audit("ana", "x"), OPERATORS_LINE)  # type: ignore[attr-defined]
    raw_values(table.store).note_walk("re-encrypt", "key 2", why)
    keys(2)
    level, found, _ = line(operate)
    assert (level, found.endswith("no request needs it: 1 reason in the audit (key 2)")) == ("warn", True)


def test_job_that_has_not_ended_keeps_its_missing_key_broken(
    table: KeyTable, operate: Run, keys: Callable[..., None]
) -> None:
    fill(table.store, table.url)
    only_the_audit_and_jobs_are_left(table, "plain")
    only_the_audit_and_jobs_are_left(table, "one")
    table.execute("UPDATE idempotency_outbox SET state = 'done' WHERE id = 'job-plain'")
    table.execute("UPDATE idempotency_audit SET why = 'oncekey-sealed:' WHERE key = 'plain-unknown'")
    keys(2)
    assert line_of_level(operate, "fail")[1] == "add key 1 to the keyring of every process"
    table.execute("UPDATE idempotency_outbox SET state = 'done' WHERE id = 'job-one'")
    assert "fail" not in [level for level, _, _ in lines(operate)]
    words = line_of_level(operate, "warn")[0]
    assert "2 reasons in the audit and 4 values of jobs and rows that have ended (key 1)" in words


def line_of_level(operate: Run, level: str) -> tuple[str, str]:
    found = [(words, advice) for of, words, advice in lines(operate) if of == level]
    return found[0]


# -- how much it reads ---------------------------------------------------------------------------------------------


@pytest.fixture
def time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one page of two rows."""
    monkeypatch.setattr(encryption, "PAGE_ROWS", 2)
    monkeypatch.setattr(encryption, "LOOK_SECONDS", 0.0)


def test_doctor_reads_all_pages_if_there_is_time(
    table: KeyTable, operate: Run, keys: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the missing key is the last one."""
    monkeypatch.setattr(encryption, "PAGE_ROWS", 2)
    for name in ("a", "b", "c"):
        put(sealed(table.store, ring(2)), name, version=514)
    keys(2)
    level, found, advice = line(operate)
    assert (level, advice, found.startswith("in all 21 rows: all values are encrypted")) == ("ok", "", True)
    put(sealed(table.store, ring(1)), "z", version=258)
    assert line(operate)[0] == "fail"


@pytest.mark.usefixtures("time_is_over")
def test_doctor_that_read_a_part_says_so_at_every_level(
    table: KeyTable, operate: Run, keys: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(sealed(table.store, ring(2)), "a", version=514)
    put(sealed(table.store, ring(1)), "z", version=258)  # not read
    part = "in the first 2 rows (the others were not read): "
    keys(2)
    level, found, advice = line(operate)
    assert (level, found.startswith(f"{part}all values are encrypted")) == ("ok", True)
    assert advice == "run `oncekey keys re-encrypt --dry-run`: it reads all rows"
    keys(3)
    assert line(operate)[:2][0] == "fail"
    assert line(operate)[1].startswith(part)
    monkeypatch.delenv("ONCEKEY_KEYS")
    assert line(operate)[:2] == ("warn", f"{part}key 2 is in use, and this command has no keyring to try")


@pytest.mark.usefixtures("time_is_over")
def test_doctor_without_a_keyring_says_that_it_read_a_part(table: KeyTable, operate: Run, keys: Any) -> None:
    for number in range(10):
        table.put(f"order-{number}-of-today", State.COMPLETED)
    words = "in the first 2 rows (the others were not read): no value is encrypted, and no keyring is given"
    assert line(operate) == ("ok", words, "")


def test_store_that_cannot_hand_out_values_has_no_such_line() -> None:
    class Own:
        """A store of one's own, with what every store has."""

        def __init__(self) -> None:
            self._store = MemoryStore()

        def __getattr__(self, name: str) -> Any:
            if name in ("kept", "rewrite", "note_walk"):
                raise AttributeError(name)
            return getattr(self._store, name)

    assert "encryption" in [each.check for each in examine(MemoryStore())]
    assert "encryption" not in [each.check for each in examine(Own())]
