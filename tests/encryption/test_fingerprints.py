"""Keyed fingerprints: what they are made of, and how a request is compared with rows under all kinds of keys."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.decision import NEWER_VERSION, Claim, Decision, Execute, Mismatch, Replay, Unreadable, decide
from oncekey.core.recipe import DEFAULT_HEADERS, Parts, Recipe
from oncekey.core.record import Record, Reservation
from oncekey.core.states import Effects, Event, State
from oncekey.encryption import Keyring
from oncekey.encryption.fingerprints import KeyedFingerprints
from tests.encryption.rings import ONE, TWO, ring

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors/keyed-fingerprints/vectors.json").read_text("utf-8")
)
BODY, OTHER = b'{"amount":1,"at":1}', b'{"amount":2,"at":1}'
LINES = [(b"if-match", b'"1"'), (b"accept", b"a/b")]
RECIPES = [
    Recipe.of(None, DEFAULT_HEADERS),
    Recipe.of(None, ()),
    Recipe.of(("amount",), DEFAULT_HEADERS),
    Recipe.of(("amount", "at"), ("accept", "if-match")),
]


def parts_of(body: bytes = BODY) -> Parts:
    return (
        *("POST", "/payments", b"", "application/json", body),
        lambda names: [line for line in LINES if line[0] in names],
    )


def wanted(
    keyring: Keyring | None = None,
    body: bytes = BODY,
    *,
    recipe: Recipe = RECIPES[0],
    scope: str = "acme",
    key: str = "k-1",
    owner: str = "retry",
) -> Reservation:
    parts = parts_of(body)
    plain = Reservation(
        *(scope, key, "POST /payments", recipe.fingerprint(parts), 2, Effects.REPEATABLE, owner, 60.0, 86400.0),
        fingerprint_recipe=recipe.text,
        parts=parts,
    )
    return plain if keyring is None else KeyedFingerprints(keyring)(plain)


def row(of: Reservation, state: State = State.COMPLETED) -> Record:
    return replace(of.record(now=1000.0), state=state, owner="first")


def with_plain_version_1(record: Record) -> Record:
    digest = Recipe(None, frozenset(), None).fingerprint(parts_of(), 1)
    return replace(record, fingerprint=digest, fingerprint_version=1, fingerprint_recipe=None)


# -- what they are made of ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["why"])
def test_fingerprint_is_that_of_the_vector(vector: dict[str, Any]) -> None:
    sent: Parts = (
        *(vector["method"], vector["path"], vector["query"].encode(), vector["content_type"], vector["body"].encode()),
        lambda names: [],
    )
    plain = RECIPES[0].fingerprint(sent)
    assert plain.hex() == vector["plain"]
    keyring = Keyring({vector["id"]: bytes.fromhex(vector["secret"])})
    before = replace(wanted(scope=vector["scope"], key=vector["key"]), fingerprint=plain)
    after = KeyedFingerprints(keyring)(before)
    assert after.fingerprint.hex() == vector["fingerprint"]
    assert after.fingerprint_version == vector["fingerprint_version"]


def test_vectors_differ_but_for_the_two_spellings_of_one_request() -> None:
    found = [vector["fingerprint"][8:] for vector in VECTORS]
    assert len(found) - len(set(found)) == 2  # the other spelling, and the other id of the same secret


def test_reservation_keeps_everything_but_its_fingerprint() -> None:
    before = replace(wanted(recipe=RECIPES[2]), quarantine_seconds=7.0, bindings=("ab",))
    after = KeyedFingerprints(ring(2))(before)
    same = replace(after, fingerprint=before.fingerprint, fingerprint_version=2)
    assert (same, after.parts, after.bindings) == (before, before.parts, before.bindings)
    assert (after.fingerprint_version, len(after.fingerprint)) == (2 * 256 + 2, 36)
    assert before.fingerprint not in after.fingerprint


def test_two_rows_with_one_request_share_no_fingerprint() -> None:
    """Of one tenant or of two: a reader of the database must not see who asked for the same."""
    names = [("acme", "k-1"), ("acme", "k-2"), ("globex", "k-1"), ("acmek", "-1")]
    found = {wanted(ring(), scope=scope, key=key).fingerprint[4:] for scope, key in names}
    assert len(found) == len(names)


def test_text_that_is_not_unicode_has_a_fingerprint() -> None:
    found = {wanted(ring(), scope=scope).fingerprint for scope in ("\udc80", "\udc81", "?", "ü")}
    assert len(found) == 4


# -- how a request is compared -------------------------------------------------------------------------------------


RINGS = {"no ring": None, "1": ring(1), "2": ring(2), "1, 2": ring(1, 2), "2, 1": ring(2, 1)}


@pytest.mark.parametrize("now", RINGS)
@pytest.mark.parametrize("then", RINGS)
def test_request_is_compared_under_the_key_and_recipe_of_the_row(then: str, now: str) -> None:
    before, after = RINGS[then], RINGS[now]
    readable = before is None or (after is not None and before.current in after.ids)
    for theirs, ours in product(RECIPES, RECIPES):
        record = row(wanted(before, recipe=theirs))
        again, other = decide(record, wanted(after, recipe=ours)), decide(record, wanted(after, OTHER, recipe=ours))
        if readable:
            assert (again, other) == (Replay(record), Mismatch(record)), (theirs, ours)
        else:
            assert (type(again), type(other)) == (Unreadable, Unreadable), (theirs, ours)


@pytest.mark.parametrize("keyring", [None, ring(1), ring(2, 1)], ids=str)
def test_row_of_version_1_is_compared_as_before(keyring: Keyring | None) -> None:
    record = with_plain_version_1(row(wanted()))
    assert decide(record, wanted(keyring)) == Replay(record)
    assert decide(record, wanted(keyring, OTHER)) == Mismatch(record)


def lost(decision: Decision) -> str:
    assert isinstance(decision, Unreadable)
    return decision.reason


@pytest.mark.parametrize("state", [state for state in State if state is not State.EXPIRED])
@pytest.mark.parametrize("body", [BODY, OTHER])
def test_row_under_a_key_that_is_not_in_the_ring_is_not_compared_in_any_state(state: State, body: bytes) -> None:
    record = row(wanted(ring(3)), state)
    for keyring in (ring(1), ring(2, 1)):
        reason = lost(decide(record, wanted(keyring, body)))
        assert "needs encryption key 3, which is not in the keyring" in reason
        assert "Add key 3 to OnceKey(encryption=…)" in reason
    reason = lost(decide(record, wanted(None, body)))
    assert "made with encryption key 3, and this process has no keyring. Give it the keyring of the other" in reason


@pytest.mark.parametrize("state", [state for state in State if state is not State.EXPIRED])
@pytest.mark.parametrize("body", [BODY, OTHER])
def test_row_under_another_secret_of_the_same_id_is_not_compared(state: State, body: bytes) -> None:
    """A mismatch would be wrong: the client of an honest retry would take a new key, and pay twice."""
    record = row(wanted(Keyring({1: ONE})), state)
    reason = lost(decide(record, wanted(Keyring({1: TWO}), body)))
    assert "another encryption key 1 than this process has" in reason
    assert "put the earlier key 1 back" in reason


def test_row_under_another_secret_of_an_older_id_is_not_compared() -> None:
    record = row(wanted(Keyring({1: ONE})))
    assert "another encryption key 1" in lost(decide(record, wanted(Keyring({2: ONE, 1: TWO}))))


@pytest.mark.parametrize("version", [3, 256 + 3, 256 + 255, 255])
def test_version_or_recipe_of_a_newer_oncekey_is_said_to_be_one(version: int) -> None:
    record = row(wanted(ring(1)))
    assert lost(decide(replace(record, fingerprint_version=version), wanted(ring(1)))) == NEWER_VERSION
    assert lost(decide(replace(record, fingerprint_recipe="unheard of"), wanted(ring(1)))) == NEWER_VERSION


def test_own_reservation_and_expired_key_need_no_comparison() -> None:
    """The key of the ring is lost, and both go on: the one holds the lease, the other starts over."""
    mine = replace(row(wanted(ring(3)), State.IN_PROGRESS), owner="retry")
    assert decide(mine, wanted(ring(1))) == Execute(mine)
    over = replace(row(wanted(ring(3))), expires_at=999.0)
    assert decide(over, wanted(ring(1))) == Claim(over, Event.RESERVE)


@pytest.mark.parametrize("then", [None, ring(1)], ids=str)
@pytest.mark.parametrize("now", [ring(1), ring(2, 1)], ids=str)
def test_bound_key_is_compared_by_its_binding_and_its_key(then: Keyring | None, now: Keyring) -> None:
    text = '{"bind":"00ff","headers":["if-match","if-none-match"]}'
    record = replace(row(wanted(then)), fingerprint_recipe=text)
    assert decide(record, replace(wanted(now), bindings=("00ff",))) == Replay(record)
    assert decide(record, replace(wanted(now, OTHER), bindings=("00ff",))) == Mismatch(record)
    assert decide(record, replace(wanted(now), bindings=("00aa",))) == Mismatch(record)
