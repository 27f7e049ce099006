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
from tests.encryption.kept_rows import SECRET, fill, kept, raw_text, readable
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
    assert lines[0] == ["read", str(sum(1 for _ in kept(table.store))), "rows", "with", "31", "values"]
    assert lines[2][:7] == ["2,", "current", "11", "0", "0", "0", "0"]
    assert lines[3][:6] == ["1", "10", "10", "0", "0", "0"]
    assert lines[4][:7] == ["not", "encrypted", "10", "10", "0", "0", "0"]
    old, plain = out.splitlines()[-2:]
    assert re.sub(r"20\d\d-\S+Z", "DATE", old) == f"key 1 is needed at least until DATE: {OPEN}"
    assert plain == "4 rows have a fingerprint from before encryption: no key is needed for it"
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
    assert out.splitlines()[-2] == "key 1 is needed: 10 values are under it"
    assert list(kept(table.store)) == before
    code, out, _ = operate("keys", "re-encrypt", "--dry-run", "--json")
    said = json.loads(out)
    assert (code, said["dry_run"], said["current"], said["rows"]) == (1, True, 2, len(before))
    assert {number: of["found"] for number, of in said["keys"].items()} == {"0": 10, "1": 10, "2": 10}
    assert said["keys"]["1"]["fingerprints"] == 4
    assert said["keys"]["1"]["until"].endswith("Z")


def test_lost_key_is_named_and_the_exit_code_is_1(table: KeyTable, operate: Run, keys: Callable[..., None]) -> None:
    fill(table.store, table.url)
    keys(3, 2)
    code, out, error = operate("keys", "re-encrypt", *SURE)
    assert code == 1
    assert "key 1 is not in this keyring: its values stay as they are. Add the key and run it again" in out
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

    def interrupted(store: object, name: str, *place: object) -> object:
        if name == "steps":
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
    assert "key 1 is needed: 10 values are under it" in out
    assert out.splitlines()[-1].startswith("this keyring does not encrypt (plain): new values are plain text")

    code, _, error = operate("keys", "re-encrypt", "--decrypt", said="because\nno\n")
    assert (code, "all stored values are written again as plain text, also those under 1, 2" in error) == (1, True)
    assert "every process must have a keyring that begins with plain already" in error

    code, out, error = operate("keys", "re-encrypt", "--decrypt", *SURE)
    assert (code, error) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[2][:4] == ["not", "encrypted", "11", "0"]
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
