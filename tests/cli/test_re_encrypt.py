"""``oncekey keys re-encrypt``: what it changes, what it prints, and what it refuses."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from oncekey.encryption.store import sealed
from oncekey.stores.kept_api import OPERATORS_LINE
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import KeyTable, Run, runner
from tests.encryption.kept_rows import SECRET, fill, kept, put, raw_text, readable
from tests.encryption.rings import ONE, THREE, TWO, ring

SURE = ("--yes", "--why", "key 1 was in a log", "--who", "ana")
OPEN = (
    "4 rows have a fingerprint that was made with it; 3 of them are not final yet: "
    f"{redact('one-half')} (failed_retryable), {redact('one-running')} (in_progress), "
    f"{redact('one-unknown')} (unknown); "
    "see `oncekey keys list --state failed_retryable` and `oncekey keys list --state in_progress` and "
    "`oncekey keys list --state unknown`"
)
MASTERS = {1: ONE, 2: TWO, 3: THREE}


def entry(*numbers: int) -> str:
    return ",".join(f"{number}:{base64.b64encode(MASTERS[number]).decode()}" for number in numbers)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *numbers: monkeypatch.setenv("ONCEKEY_KEYS", entry(*numbers))


def test_command_rewrites_all_values_and_says_what_is_left(
    table: KeyTable, operate: Run, keys: Callable[..., None]
) -> None:
    fill(table.store, table.url)
    before = readable(table.store, ring(2, 1))
    keys(2, 1)

    code, out, error = operate("keys", "re-encrypt", *SURE)

    assert (code, error) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    line_of_this_run = 1
    rows = sum(1 for _ in kept(table.store)) - line_of_this_run
    assert lines[0] == ["read", str(rows), "rows", "with", "30", "values"]
    assert lines[2][:7] == ["2,", "current", "10", "0", "0", "0", "0"]
    assert lines[3][:6] == ["1", "10", "10", "0", "0", "0"]
    assert lines[4][:7] == ["not", "encrypted", "10", "10", "0", "0", "0"]
    old, plain = out.splitlines()[-2:]
    assert re.sub(r"20\d\d-\S+Z", "DATE", old) == f"key 1 is needed at least until DATE: {OPEN}"
    words = "4 rows have a fingerprint from before encryption at least until DATE: no key is needed for them"
    assert re.sub(r"20\d\d-\S+Z", "DATE", plain) == words
    assert readable(table.store, ring(2)) == before
    assert SECRET not in raw_text(table.store)
    (line,) = sealed(table.store, ring(2)).audit(*OPERATORS_LINE, 10)
    assert (line.who, line.event, line.why) == ("ana", "re-encrypt", "key 1 was in a log")


def test_operator_is_asked_first(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    fill(table.store, table.url)
    before = list(kept(table.store))
    keys(2, 1)
    code, _, error = operate("keys", "re-encrypt", said="because\nno\n")
    assert code == 1
    assert "all stored values are written again under key 2, also those under 1 and plain ones" in error
    words = "every process must have key 2 already: without it, it replays answers without their bodies, or answers 503"
    assert words in error
    assert "nothing was changed" in error
    assert list(kept(table.store)) == before


def test_dry_run_asks_nothing_and_changes_nothing(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    fill(table.store, table.url)
    before = list(kept(table.store))
    keys(2, 1)
    code, out, error = operate("keys", "re-encrypt", "--dry-run")
    assert (code, error) == (1, "")
    needed = re.sub(r"20\d\d-\S+Z", "DATE", out.splitlines()[-2])
    assert needed == f"key 1 is needed at least until DATE: 10 values are under it, and {OPEN}"
    assert list(kept(table.store)) == before
    code, out, _ = operate("keys", "re-encrypt", "--dry-run", "--json")
    said = json.loads(out)
    assert (code, said["dry_run"], said["current"], said["rows"]) == (1, True, 2, len(before))
    assert {number: of["found"] for number, of in said["keys"].items()} == {"0": 10, "1": 10, "2": 10}
    assert said["keys"]["1"]["fingerprints"] == 4
    assert said["keys"]["1"]["until"].endswith("Z")


def test_lost_key_is_named_and_the_exit_code_is_1(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    fill(table.store, table.url)
    keys(2)
    code, out, error = operate("keys", "re-encrypt", *SURE)
    assert code == 1
    assert "key 1 is not in this keyring: 9 values cannot be read. Add the key and run it again" in out
    assert "key 1 is not in this keyring, and this is under it: 1 reason in the audit. No request needs that" in out
    (needed,) = [line for line in out.splitlines() if line.startswith("key 1 is needed at least until ")]
    assert f": 9 values are under it, and {OPEN}. It is not in this keyring, so their retries get 503" in needed
    assert "which is not in the keyring of this process" in error or not error


def test_key_that_is_not_needed_is_said_to_be(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    keys(2, 1)
    code, out, _ = operate("keys", "re-encrypt", "--dry-run")
    assert (code, out.splitlines()[-1]) == (
        0,
        "key 1 is not needed: nothing is under it. Remove it, unless it is your next one",
    )


def test_key_that_was_removed_too_early_is_named(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    """Nothing is under it, but fingerprints were made with it: retries of their rows are refused."""
    fill(table.store, table.url)
    keys(2, 1)
    assert operate("keys", "re-encrypt", *SURE)[0] == 0
    keys(2)
    code, out, _ = operate("keys", "re-encrypt", "--dry-run")
    assert code == 1
    said = out.splitlines()[-2]
    assert OPEN in said
    assert said.endswith(". It is not in this keyring, so their retries get 503: add it again")


def test_dry_run_exits_with_0_only_when_the_old_key_can_be_removed(
    table: KeyTable, operate: Run, keys: Callable[..., None]
) -> None:
    """So `re-encrypt --dry-run && remove-the-old-key` is safe: values, fingerprints and what does not open count."""
    fill(table.store, table.url)
    keys(2, 1)
    assert operate("keys", "re-encrypt", "--dry-run")[0] == 1
    assert operate("keys", "re-encrypt", *SURE)[0] == 0
    assert operate("keys", "re-encrypt", "--dry-run")[0] == 1  # fingerprints of key 1
    table.execute("UPDATE idempotency_keys SET fingerprint_version = 514 WHERE fingerprint_version = 258")
    assert operate("keys", "re-encrypt", "--dry-run")[0] == 0
    keys(3, 1)
    assert operate("keys", "re-encrypt", "--dry-run")[0] == 1  # values of a key that is not there


def test_interrupted_command_says_that_it_can_go_on(
    table: KeyTable, operate: Run, keys: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(table.store, table.url)
    keys(2, 1)
    kept_rows = type(table.store)._kept_rows  # type: ignore[attr-defined]
    read: list[str] = []

    def interrupted(store: object, name: str, *place: object) -> object:
        read.append(name)
        if read.count("steps") == 2:  # the first walk only reads
            raise KeyboardInterrupt
        return kept_rows(store, name, *place)

    with monkeypatch.context() as patch:
        patch.setattr(type(table.store), "_kept_rows", interrupted)
        code, _, error = operate("keys", "re-encrypt", *SURE)
    assert (code, error) == (130, "oncekey: ended after 6 rewritten values; run it again to go on\n")
    assert operate("keys", "re-encrypt", *SURE)[0] == 0
    assert SECRET not in raw_text(table.store)


def test_command_without_a_keyring_says_what_to_set(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    code, _, error = operate("keys", "re-encrypt", "--dry-run")
    assert (code, "ONCEKEY_KEYS is not set" in error) == (1, True)


# -- a keyring that does not encrypt -------------------------------------------------------------------------------


@pytest.fixture
def plain_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEKEY_KEYS", f"plain,{entry(2, 1)}")


@pytest.mark.usefixtures("plain_keys")
def test_plain_keyring_without_decrypt_is_refused_before_the_operator_is_asked(table: KeyTable, operate: Run) -> None:
    fill(table.store, table.url)
    before = list(kept(table.store))
    code, out, error = operate("keys", "re-encrypt", *SURE)
    assert (code, out) == (1, "")
    assert "this keyring begins with plain, so it does not encrypt" in error
    assert "add --decrypt" in error
    assert list(kept(table.store)) == before


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_decrypt_with_a_keyring_that_encrypts_is_refused(
    table: KeyTable, operate: Run, keys: Callable[..., None], dry: tuple[str, ...]
) -> None:
    fill(table.store, table.url)
    before = list(kept(table.store))
    keys(2, 1)
    code, _, error = operate("keys", "re-encrypt", "--decrypt", *dry, *SURE)
    assert (code, "the keyring encrypts with key 2, and so does the app" in error) == (1, True)
    assert list(kept(table.store)) == before


@pytest.mark.usefixtures("plain_keys")
def test_encryption_is_switched_off_step_by_step(table: KeyTable, operate: Run) -> None:
    """The exit code of the dry run is 0 only when a process without a keyring can read and compare every row."""
    fill(table.store, table.url)
    before = readable(table.store, ring(2, 1))
    code, out, error = operate("keys", "re-encrypt", "--dry-run")
    assert (code, error) == (1, "")
    assert ": 10 values are under it, and 4 rows have a fingerprint" in out
    assert out.splitlines()[-1].startswith("this keyring does not encrypt (plain): new values are plain text")

    code, _, error = operate("keys", "re-encrypt", "--decrypt", said="because\nno\n")
    assert (code, "all stored values are written again as plain text, also those under 1, 2" in error) == (1, True)
    assert "every process must have a keyring that begins with plain already" in error

    code, out, error = operate("keys", "re-encrypt", "--decrypt", *SURE)
    assert (code, error) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[2][:4] == ["not", "encrypted", "10", "0"]
    assert [lines[3][:3], lines[4][:3]] == [["1", "10", "10"], ["2", "10", "10"]]
    assert "oncekey-sealed" not in raw_text(table.store)
    assert "key 1 is needed at least until" in out  # its fingerprints
    assert readable(table.store, ring(3)) == before
    (line,) = table.store.audit(*OPERATORS_LINE, 10)
    assert (line.after, line.why) == ("plain", "key 1 was in a log")

    assert operate("keys", "re-encrypt", "--dry-run")[0] == 1
    table.execute("UPDATE idempotency_keys SET fingerprint_version = 2")  # the rows have expired, and others came
    code, out, _ = operate("keys", "re-encrypt", "--dry-run")
    assert code == 0
    assert "key 1 is not needed: nothing is under it\n" in out
    assert out.splitlines()[-1].startswith("no key is needed. This keyring does not encrypt (plain)")
    assert json.loads(operate("keys", "re-encrypt", "--dry-run", "--json")[1])["current"] == 0


# -- a key that is declared lost ---------------------------------------------------------------------------------------


def test_key_that_is_declared_lost_keeps_its_values_and_does_not_fail_the_command(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(table.store, table.url)
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(2)},1:lost")
    code, out, error = operate("keys", "re-encrypt", *SURE)
    assert (code, error) == (0, "")
    assert "key 1 is declared lost, and its entry is needed at least until" in out
    assert "what is under it stays as it is, and retries of its rows are refused; " in out
    assert "not final yet: " in out, "rows that wait for a verdict are named"
    assert "Add the key" not in out
    assert operate("keys", "re-encrypt", "--dry-run")[0] == 1, "a script must not take the entry out yet"
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(2)},1:lost,3:lost")
    assert (
        "key 3 is declared lost, and nothing is under it: take its entry out"
        in operate("keys", "re-encrypt", "--dry-run")[1]
    )
    monkeypatch.setenv("ONCEKEY_KEYS", entry(2))
    assert operate("keys", "re-encrypt", "--dry-run")[0] == 1


def test_lost_key_is_needed_as_long_as_a_row_or_a_job_that_has_not_ended_is_under_it(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit is kept for 400 days, and ended jobs for a week: nothing that they hold can be retried."""
    fill(table.store, table.url)
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(2)},1:lost")
    dry_run = ("keys", "re-encrypt", "--dry-run")
    assert operate("keys", "re-encrypt", *SURE)[0] == 0
    assert "values of jobs can never be read: see `oncekey dead-letters list`, and discard them" in operate(*dry_run)[1]

    for name in ("keys", "steps"):
        table.execute(f"DELETE FROM idempotency_{name} WHERE key LIKE 'one-%'")
    code, out, _ = operate(*dry_run)
    assert (code, "key 1 is declared lost, and its entry is needed: what is under it stays" in out) == (1, True)
    assert operate("dead-letters", "discard", "job-one", *SURE)[0] == 0
    code, out, _ = operate(*dry_run)
    words = (
        "key 1 is declared lost, and its entry is not needed: take it out of the keyring. Only this is under it, and "
    )
    rest = "can never be read: 1 reason in the audit and 4 values of jobs and rows that have ended"
    assert (code, f"{words}{rest}" in out) == (0, True)
    assert "entry is needed" not in out
    assert operate("keys", "re-encrypt", *SURE)[0] == 0

    monkeypatch.setenv("ONCEKEY_KEYS", entry(2))
    for command in (dry_run, ("keys", "re-encrypt", *SURE)):
        code, out, _ = operate(*command)
        assert code == 0, "the page says to take the entry out, so it must not be missed"
        assert "key 1 is not in this keyring, and this is under it: 1 reason in the audit and 4 values of jobs" in out
        assert "key 1 is needed" not in out
    told = json.loads(operate(*dry_run, "--json")[1])["keys"]["1"]
    assert (told["not_opened"], told["not_opened_reasons"], told["not_opened_ended"], told["left"]) == (5, 1, 4, 0)


def test_lost_key_of_an_answer_alone_is_needed_until_its_row_expires(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is plain: only the answer was written under key 1, by a rotation."""
    put(sealed(table.store, ring(1)), "one")
    put(sealed(table.store, ring(2)), "two", version=514)
    table.execute("DELETE FROM idempotency_keys WHERE key LIKE 'one-%' AND key <> 'one-done'")
    table.execute("DELETE FROM idempotency_steps WHERE key LIKE 'one-%'")
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(2)},1:lost")
    code, out, _ = operate("keys", "re-encrypt", "--dry-run")
    assert code == 1
    assert re.search(r"key 1 is declared lost, and its entry is needed until 20\S+Z: what is under it stays", out)


def test_new_key_does_not_get_the_number_of_a_lost_one(operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEKEY_KEYS", f"{entry(1)},2:lost")
    assert operate("keys", "new-key")[1].startswith("3:")
    assert "has a key 2 already" in operate("keys", "new-key", "2")[2]


APP = """
import base64
from oncekey import SINGLE_TENANT, OnceKey
from oncekey.encryption import Keyring

once = OnceKey("sqlite:///{path}", scope=SINGLE_TENANT, encryption=Keyring.from_text("{keys}"))
plain = OnceKey("sqlite:///{path}", scope=SINGLE_TENANT)
"""


def test_app_gives_its_store_and_its_keyring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.db"
    own = KeyTable(f"sqlite:///{path}")
    fill(own.store, own.url)
    (tmp_path / "rotating_app.py").write_text(APP.format(path=path, keys=entry(2, 1)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    run = runner("sqlite:///not-used.db", monkeypatch, capsys)
    code, _, error = run("keys", "re-encrypt", "--app", "rotating_app:once", *SURE)
    assert (code, error) == (0, "")
    assert SECRET not in raw_text(own.store)
    assert not (tmp_path / "not-used.db").exists()

    code, _, error = run("keys", "re-encrypt", "--app", "rotating_app:plain", *SURE)
    assert (code, "this OnceKey has no keyring: give it one with encryption=" in error) == (1, True)
    code, _, error = run("keys", "re-encrypt", "--app", "rotating_app:once", "--store", own.url, *SURE)
    assert (code, "give one of them" in error) == (1, True)
    own.close()
