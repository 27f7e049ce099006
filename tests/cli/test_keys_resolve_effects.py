"""``oncekey keys resolve`` for a key with steps: one effect happened, or did not."""

from __future__ import annotations

import hashlib
import json

import pytest

from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.doubts import with_cause
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import StepsOf, StepState
from oncekey.core.verdicts import Happened
from oncekey.errors import MoveRefused
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import RESPONSE, KeyTable, Run
from tests.cli.test_keys_resolve import KEY, RESOLVE, SURE


def test_effect_that_happened_gets_its_result(table: KeyTable, operate: Run) -> None:
    """The key is retryable under a new owner, the step is done, and the audit says which effect it was."""
    seen = table.in_doubt(KEY, "charge")
    happened = ("--happened", "charge", "--result", '{"id": "ch_7"}', "--provider-id", "ch_7")
    code, out, error = operate(*RESOLVE, *happened, said="it is in their ledger\nn\n")
    assert (code, out) == (1, "")
    assert "failed_retryable: effect 'charge' is done, and the next retry goes on after it" in error
    code, out, error = operate(*RESOLVE, *happened, *SURE)
    assert (code, error) == (0, "")
    assert out == f"key {redact(KEY)}: unknown -> failed_retryable; in the audit as ann: the provider says so\n"
    record = table.there(KEY)
    assert record is not None
    assert (record.state, record.effects, record.recovery_point) == (State.FAILED_RETRYABLE, Effects.PHASED, "charge")
    assert record.owner != seen.owner
    ((_, charge),) = table.store.steps([StepsOf("acme", KEY)])
    assert (charge.state, charge.result, charge.provider_id) == (StepState.DONE, b'{"id":"ch_7"}', "ch_7")
    why = "effect 'charge' happened: the provider says so"
    assert table.audit(KEY) == [("ann", "happened", "unknown", "failed_retryable", why)]


@pytest.mark.parametrize("state", [State.FAILED_RETRYABLE, State.UNKNOWN])
def test_result_of_a_done_effect_is_corrected(table: KeyTable, operate: Run, state: State) -> None:
    """Under a new owner, without another change of the key; the audit has the size and the hash of the old result."""
    make = table.dead_half_done if state is State.FAILED_RETRYABLE else table.expired_half_done
    seen = make(KEY)
    correct = ("--correct", "charge", "--result", '{"id": "ch_7"}', "--provider-id", "ch_7")
    _, _, error = operate(*RESOLVE, *correct, said="it was a string\nn\n")
    assert f"stays {state}: the next attempt gets another result of effect 'charge'" in error
    code, out, error = operate(*RESOLVE, *correct, *SURE)
    assert (code, out.startswith(f"key {redact(KEY)}: {state} -> {state}"), error) == (0, True, "")
    record = table.there(KEY)
    assert record is not None
    assert (record.state, record.effects, record.last_error) == (state, seen.effects, seen.last_error)
    assert (record.owner != seen.owner, record.reconcile_tries, record.dead) == (True, 0, False)
    ((charge,),) = table.store.steps([StepsOf("acme", KEY)])
    assert (charge.state, charge.result, charge.provider_id) == (StepState.DONE, b'{"id":"ch_7"}', "ch_7")
    digest = hashlib.sha256(b'{"id":"ch_1"}').hexdigest()[:8]
    why = f"result of effect 'charge' corrected from 13 bytes (SHA-256 {digest}…) to 13 bytes: the provider says so"
    assert table.audit(KEY)[0] == ("ann", "correct", state, state, why)
    with pytest.raises(MoveRefused, match="changed before this"):
        changes.correct(table.store, seen, Happened(1, "charge"), Audit("ben", "late"))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (State.IN_PROGRESS, "is in_progress: only the result of an effect of an unknown or half-done key"),
        (State.COMPLETED, "is completed: only the result"),
        (State.PENDING, "is pending: only the result"),
        (State.UNKNOWN, "this key has no effect 'charge'"),
    ],
)
def test_only_the_result_of_a_done_effect_is_corrected(table: KeyTable, operate: Run, state: State, says: str) -> None:
    table.put(KEY, state)
    code, out, error = operate(*RESOLVE, "--correct", "charge", "--result", "1", *SURE)
    assert (code, out, says in error, table.audit(KEY)) == (1, "", True, [])
    table.in_doubt("another-key-of-today", "charge")
    other = ("keys", "resolve", "another-key-of-today", "--scope", "acme", "--correct", "charge", "--result", "1")
    assert "effect 'charge' is not done: it has no result yet" in operate(*other, *SURE)[2]


def test_effect_that_did_not_happen_waits_for_the_quarantine(table: KeyTable, operate: Run) -> None:
    table.in_doubt(KEY, "charge", age=100)
    before = table.there(KEY)
    code, out, error = operate(*RESOLVE, "--not-happened", "charge", *SURE)
    assert (code, out, table.there(KEY), table.audit(KEY)) == (1, "", before, [])
    assert "cannot be said not to have happened for another" in error
    assert "or use `--happened charge --result JSON`, if it has happened" in error
    assert operate(*RESOLVE, "--not-happened", "charge", "--quarantine", "0s", *SURE)[0] == 0
    why = "effect 'charge' did not happen: quarantine cut short from 300 s to 0 s: the provider says so"
    assert table.audit(KEY) == [("ann", "not_happened", "unknown", "failed_retryable", why)]
    ((_, charge),) = table.store.steps([StepsOf("acme", KEY)])
    assert (charge.state, charge.repeatable) == (StepState.INTENDED, True)


def test_key_stays_unknown_while_another_effect_is_in_doubt(table: KeyTable, operate: Run) -> None:
    table.in_doubt(KEY, "charge", "mail", age=1000)
    code, out, _ = operate(*RESOLVE, "--happened", "mail", "--result", "null", *SURE)
    assert (code, out.splitlines()[1]) == (0, "it stays unknown: effect 'charge' is in doubt")
    assert operate(*RESOLVE, "--not-happened", "charge", *SURE)[0] == 0
    record = table.there(KEY)
    assert record is not None
    assert record.state is State.FAILED_RETRYABLE


def test_refuting_clears_every_effect_in_doubt(table: KeyTable, operate: Run) -> None:
    table.in_doubt(KEY, "charge", "mail", age=1000)
    assert operate(*RESOLVE, "--refute", *SURE)[0] == 0
    ((_, *steps),) = table.store.steps([StepsOf("acme", KEY)])
    assert [(step.state, step.repeatable) for step in steps] == [(StepState.INTENDED, True)] * 2
    assert [event for _, event, *_ in table.audit(KEY)] == ["not_happened", "not_happened"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--happened", "mail", "--result", "1"], "this key has no effect 'mail'; effect 'charge' is in doubt"),
        (["--happened", "ride", "--result", "1"], "effect 'ride' is done, and keeps its result; --refute lets"),
        (["--not-happened", "ride"], "effect 'ride' is done"),
        (["--confirm", "--status", "201"], "--confirm skips every phase after it. Use `--happened charge"),
        (["--fail", "--status", "422"], "--fail skips every phase after it. Use `--happened charge"),
    ],
)
def test_verdict_that_does_not_fit_the_effects_is_refused_before_any_prompt(
    table: KeyTable, operate: Run, options: list[str], says: str
) -> None:
    table.in_doubt(KEY, "charge", age=1000)
    before = table.there(KEY)
    code, out, error = operate(*RESOLVE, *options)
    assert (code, out, says in error) == (1, "", True)
    assert (table.there(KEY), table.audit(KEY)) == (before, [])


def test_key_without_steps_has_no_effect_to_settle(table: KeyTable, operate: Run) -> None:
    table.put(KEY, State.UNKNOWN, age=1000)
    code, _, error = operate(*RESOLVE, "--happened", "charge", "--result", "1", *SURE)
    assert (code, "no effect of this key is in doubt" in error) == (1, True)


@pytest.mark.parametrize(("option", "state"), [("--confirm", State.COMPLETED), ("--fail", State.FAILED)])
def test_final_word_ends_a_key_with_an_effect_in_doubt(
    table: KeyTable, operate: Run, option: str, state: State
) -> None:
    table.in_doubt(KEY, "charge")
    assert operate(*RESOLVE, option, "--status", "402", "--final", *SURE)[0] == 0
    record = table.there(KEY)
    assert record is not None
    assert record.state is state


@pytest.mark.parametrize("option", ["--confirm", "--fail"])
def test_key_with_steps_is_not_ended_without_final(table: KeyTable, operate: Run, option: str) -> None:
    """Also if no effect is in doubt: its client did not retry before the key expired."""
    table.expired_half_done(KEY)
    before = table.there(KEY)
    code, out, error = operate(*RESOLVE, option, "--status", "422")
    assert (code, out, table.there(KEY)) == (1, "", before)
    assert f"this key has steps, the last that is done is 'charge', and {option} skips every phase after it" in error
    assert "Use `--refute` to let the request go on after it" in error
    with pytest.raises(MoveRefused, match="skips every phase"):
        changes.give_up(table.store, table.expired_half_done("another-key"), RESPONSE, Audit("ann", "no"))


def test_refute_says_that_a_request_with_steps_goes_on(table: KeyTable, operate: Run) -> None:
    table.expired_half_done(KEY)
    _, _, error = operate(*RESOLVE, "--refute", "--quarantine", "0s", said="no\nn\n")
    goes_on = "unknown becomes failed_retryable: the next retry goes on after step 'charge'; effects that are done are"
    assert f"{goes_on} not called again" in error
    assert "RUNS the operation" not in error
    table.in_doubt("another-key-of-today", "charge")
    other = ("keys", "resolve", "another-key-of-today", "--scope", "acme", "--refute")
    assert "goes on after step 'ride', and CALLS effect 'charge'; effects that" in operate(*other, said="no\nn\n")[2]


def test_show_keeps_why_a_key_became_unknown(table: KeyTable, operate: Run) -> None:
    record = table.expired_half_done(KEY)
    words = with_cause("not there yet", record)
    table.move(record, Event.POSTPONE, Actor.RECONCILER, reconcile_in=60.0, last_error=words)
    shown = operate("keys", "show", KEY, "--scope", "acme")[1]
    assert "not there yet; it became unknown because: half done, and the client did not retry" in shown
    command = f"oncekey keys resolve '{redact(KEY)}' --scope acme"
    assert f"after step 'charge', by `{command} --refute --why TEXT`" in shown


def test_show_names_the_effect_in_doubt_and_the_command_that_settles_it(table: KeyTable, operate: Run) -> None:
    table.in_doubt(KEY, "charge")
    code, out, _ = operate("keys", "show", KEY, "--scope", "acme")
    assert code == 0
    command = f"oncekey keys resolve '{redact(KEY)}' --scope acme"
    assert f"charge: `{command} --happened charge --result JSON --why TEXT`, or `{command} --not-happened charge" in out
    assert "it can be refuted in" in out
    assert json.loads(operate("keys", "show", KEY, "--scope", "acme", "--json")[1])["in_doubt"] == ["charge"]
