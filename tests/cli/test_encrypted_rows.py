"""The operator's commands on encrypted rows, without the keyring of the app or with another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from oncekey.admin import encryption
from oncekey.core.audit import Audit
from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import StepsOf
from oncekey.encryption import Keyring
from oncekey.encryption.fingerprints import KeyedFingerprints
from oncekey.encryption.store import sealed
from oncekey.stores.kept_api import OPERATORS_LINE
from tests.cli.key_table import RESPONSE, KeyTable, Run
from tests.cli.test_re_encrypt import entry
from tests.encryption.kept_rows import kept
from tests.encryption.rings import THREE, ring

SURE = ("--yes", "--why", "the bank's ledger has 4242", "--who", "ana")
NOT_HERE = "(encrypted with key 1, which this process does not have)"
DONE, UNKNOWN, DOUBTED, DEAD = "order-1-of-today", "order-2-of-today", "order-3-of-today", "order-4-of-today"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    return lambda *numbers: monkeypatch.setenv("ONCEKEY_KEYS", entry(*numbers))


@pytest.fixture
def job(table: KeyTable, keys: Any) -> str:
    """Rows under key 1, as an app with a keyring writes them: also their fingerprints."""
    raw, table.store = table.store, sealed(table.store, ring(1))  # type: ignore[assignment]
    table.put(DONE, State.COMPLETED)
    table.put(UNKNOWN, State.UNKNOWN)
    table.in_doubt(DOUBTED, "charge", age=10_000)
    table.dead_key(DEAD)
    for key in (DONE, UNKNOWN, DOUBTED, DEAD):
        keyed = KeyedFingerprints(ring(1)).under_key(1, "acme", key, bytes(32))
        assert keyed is not None
        value = f"x'{keyed.hex()}'" if table.is_sqlite else f"'\\x{keyed.hex()}'"
        table.execute(
            f"UPDATE idempotency_keys SET fingerprint = {value}, fingerprint_version = 258 WHERE key = '{key}'"
        )
    job_id = table.dead_job()
    table.store = raw
    return job_id


def commands(job: str) -> list[tuple[str, ...]]:
    body = ("--status", "201", "--body", '{"card": "4242"}')
    return [
        ("keys", "resolve", UNKNOWN, "--scope", "acme", "--confirm", *body),
        ("keys", "resolve", UNKNOWN, "--scope", "acme", "--fail", "--status", "402", *body[2:]),
        ("keys", "resolve", UNKNOWN, "--scope", "acme", "--refute", "--quarantine", "0s"),
        ("keys", "resolve", DOUBTED, "--scope", "acme", "--happened", "charge", "--result", '{"card": "4242"}'),
        ("keys", "resolve", DOUBTED, "--scope", "acme", "--not-happened", "charge", "--quarantine", "0s"),
        ("keys", "resolve", DOUBTED, "--scope", "acme", "--correct", "ride", "--result", '{"card": "4242"}'),
        ("keys", "forget", DONE, "--scope", "acme"),
        ("dead-letters", "retry", DEAD, "--scope", "acme"),
        ("dead-letters", "retry", job),
        ("dead-letters", "discard", job),
    ]


def test_command_without_the_keyring_writes_nothing_to_encrypted_rows(
    table: KeyTable, operate: Run, job: str, keys: Callable[..., None]
) -> None:
    """It would write a body, a result or a reason as plain text beside encrypted ones."""
    before = list(kept(table.store))
    for command in commands(job):
        code, out, error = operate(*command, *SURE)
        assert (code, out) == (1, ""), command
        assert "encrypted (key 1), and this command has no keyring" in error, command
        assert "set ONCEKEY_KEYS to the keyring of the app" in error
    assert list(kept(table.store)) == before
    keys(1)
    for command in commands(job)[::3]:
        assert operate(*command, *SURE)[0] == 0, command
    assert "4242" not in repr(list(kept(table.store)))


@pytest.mark.parametrize("column", ["response", "error", "step", "audit", "job"])
def test_one_encrypted_value_of_a_key_is_enough(table: KeyTable, operate: Run, keys: Any, column: str) -> None:
    """Its fingerprint is plain: the request began before the app had a keyring."""
    own = sealed(table.store, ring(1))
    raw, job_id = table.store, ""
    begun = table.reserve(UNKNOWN)
    table.store = own  # type: ignore[assignment]
    command: tuple[str, ...] = ("keys", "forget", UNKNOWN, "--scope", "acme")
    match column:
        case "response":
            table.move(begun, Event.COMPLETE, response=RESPONSE)
        case "error":
            table.move(begun, Event.DOUBT, last_error="TimeoutError")
        case "step":
            stepped = table.step(begun, "ride")
            table.store = raw
            table.move(stepped, Event.COMPLETE, response=RESPONSE)
        case "audit":
            table.store = raw
            doubted = table.move(begun, Event.DOUBT, last_error="TimeoutError")
            audit = own.values.sealed_audit(Audit("ana", "it is paid"), ("acme", UNKNOWN))  # type: ignore[attr-defined]
            table.move(doubted, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=audit)
        case "job":
            job_id = table.dead_job()
            command = ("dead-letters", "discard", job_id)
    table.store = raw
    if column == "error":
        command = ("keys", "resolve", UNKNOWN, "--scope", "acme", "--refute", "--quarantine", "0s")
    code, _, error = operate(*command, *SURE)
    assert (code, "this command has no keyring" in error) == (1, True)


def test_plain_rows_need_no_keyring(table: KeyTable, operate: Run, keys: Any) -> None:
    table.put(DONE, State.COMPLETED)
    assert operate("keys", "forget", DONE, "--scope", "acme", *SURE)[0] == 0
    assert operate("dead-letters", "discard", table.dead_job(), *SURE)[0] == 0


def test_plain_row_in_a_store_where_the_app_encrypts_needs_the_keyring(
    table: KeyTable, operate: Run, job: str, keys: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is from before encryption. What the command writes to it would be plain text, as the app writes none now."""
    table.put("order-5-of-today", State.UNKNOWN)
    body = ("--status", "201", "--body", '{"card": "4242"}')
    resolve = ("keys", "resolve", "order-5-of-today", "--scope", "acme", "--confirm", *body, *SURE)
    before = list(kept(table.store))
    code, out, error = operate(*resolve)
    assert (code, out) == (1, "")
    words = "nothing was changed: other values of this store are encrypted (key 1), and this command has no keyring"
    assert words in error
    assert list(kept(table.store)) == before
    monkeypatch.setattr(encryption, "PAGE_ROWS", 1)
    assert operate(*resolve)[0] == 1, "on a later page, too"
    keys(1)
    assert operate(*resolve)[0] == 0
    assert "4242" not in repr(list(kept(table.store)))


def test_reasons_and_expired_rows_under_a_key_that_is_gone_stop_no_command(
    table: KeyTable, operate: Run, job: str
) -> None:
    """Encryption is switched off again, and such leftovers stay."""
    table.execute("DELETE FROM idempotency_outbox")
    table.execute("UPDATE idempotency_keys SET state = 'expired'")
    table.put("order-5-of-today", State.COMPLETED)
    assert operate("keys", "forget", "order-5-of-today", "--scope", "acme", *SURE)[0] == 0


def test_keyring_without_the_key_of_the_row_is_enough_to_write(
    table: KeyTable, operate: Run, job: str, keys: Callable[..., None]
) -> None:
    """What is written is encrypted under its current key."""
    keys(2)
    for command in (commands(job)[0], commands(job)[3], commands(job)[8]):
        assert operate(*command, *SURE)[0] == 0, command
    assert "4242" not in repr(list(kept(table.store)))
    (record,) = sealed(table.store, ring(2)).read([("acme", UNKNOWN)])
    assert record is not None
    assert record.response is not None
    assert record.response.body == b'{"card": "4242"}'
    (steps,) = sealed(table.store, ring(2)).steps([StepsOf("acme", DOUBTED)])
    assert [step.result for step in steps if step.name == "charge"] == [b'{"card":"4242"}']


# -- keys show -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), NOT_HERE),
        ((2,), NOT_HERE),
        ("wrong", "(encrypted with key 1, and the key of this number in the keyring does not open it)"),
    ],
)
def test_show_says_that_a_response_is_encrypted(
    table: KeyTable, operate: Run, job: str, keys: Any, monkeypatch: pytest.MonkeyPatch, given: Any, words: str
) -> None:
    """It said that the body was not kept, and that a client gets a note."""
    if given == "wrong":
        monkeypatch.setenv("ONCEKEY_KEYS", entry(3).replace("3:", "1:", 1))
        assert Keyring.from_env().mac(1, b"") == Keyring({1: THREE}).mac(1, b"")
    elif given:
        keys(*given)
    code, out, _ = operate("keys", "show", DONE, "--scope", "acme")
    assert code == 0
    assert words in " ".join(out.split())
    assert "not kept" not in out
    told = json.loads(operate("keys", "show", DONE, "--scope", "acme", "--json")[1])
    assert (told["response_not_opened"], told["now"]["status"]) == (words, 503 if given else None)
    if given:
        assert "gets now: 503: This Idempotency-Key cannot be answered right now" in out
        assert told["now"]["problem"] == "urn:oncekey:problem:not-comparable"
    else:
        assert "gets now: this cannot be told without the keyring of the app: a process without it, as this" in out
        assert "answers 503; set ONCEKEY_KEYS" in out


def test_show_with_the_key_says_what_a_retry_gets(table: KeyTable, operate: Run, job: str, keys: Any) -> None:
    keys(1)
    out = operate("keys", "show", DONE, "--scope", "acme")[1]
    assert "the same request gets now: 201: the stored response, 28 bytes" in out
    assert json.loads(operate("keys", "show", DONE, "--scope", "acme", "--json")[1])["response_not_opened"] is None


def test_show_of_an_encrypted_tombstone_says_that_it_was_not_kept(table: KeyTable, operate: Run, keys: Any) -> None:
    """The envelope opens, and says so itself."""
    raw, table.store = table.store, sealed(table.store, ring(1))  # type: ignore[assignment]
    table.move(table.reserve(DONE), Event.COMPLETE, response=StoredResponse(201, (), None))
    table.store = raw
    keys(1)
    out = operate("keys", "show", DONE, "--scope", "acme")[1]
    assert "not kept" in out
    assert "gets now: 201: a note" in out


def test_show_says_that_results_and_payloads_are_encrypted(table: KeyTable, operate: Run, job: str) -> None:
    """It showed the size of the envelope."""
    raw, key = table.store, ring(1)
    payload = sealed(raw, key).values.sealed_json(b'{"to": "ada"}', (job,), "payload")  # type: ignore[attr-defined]
    table.execute(f"UPDATE idempotency_outbox SET payload = '{payload.decode()}' WHERE id = '{job}'")
    for command in (("keys", "show", DOUBTED, "--scope", "acme"), ("dead-letters", "show", job)):
        out = operate(*command)[1]
        assert NOT_HERE in out
        assert "bytes, shown with --reveal" not in out


def test_show_of_the_audit_of_a_rotation_says_what_it_is(
    table: KeyTable, operate: Run, job: str, keys: Callable[..., None]
) -> None:
    keys(2, 1)
    assert operate("keys", "re-encrypt", "--trust-key", *SURE)[0] == 0
    code, out, _ = operate("keys", "show", OPERATORS_LINE[1], "--scope", OPERATORS_LINE[0])
    assert code == 0
    assert "there is no such key" not in out
    assert out.splitlines()[-1] == (
        "the same request gets now: nothing: this is no key of a client, but the audit of `oncekey keys re-encrypt`"
    )
    assert "4242" in out


def test_show_names_the_declared_effects_of_a_phased_key_in_doubt(table: KeyTable, operate: Run) -> None:
    """Its row is external while an effect is called, which an operator took for a wrong declaration."""
    table.in_doubt(DOUBTED, "charge")
    out = operate("keys", "show", DOUBTED, "--scope", "acme")[1]
    assert "phased; external as long as effect 'charge' is in doubt" in out
    table.put(UNKNOWN, State.UNKNOWN)
    lines = operate("keys", "show", UNKNOWN, "--scope", "acme")[1].splitlines()
    assert ["effects", "external"] in [line.split() for line in lines]
