"""The Operation, the request that a scope function sees, and the tokens of owners."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from weakref import WeakSet

import pytest

from oncekey import current
from oncekey.core.policy import Policy
from oncekey.engine import process
from oncekey.engine.known_steps import Steps
from oncekey.engine.operation import Operation, _current
from oncekey.engine.process import Owners
from oncekey.engine.request import SINGLE_TENANT, Request
from oncekey.errors import ApplicationError, NoOperation, NotExecuted, OutcomeUnknown, Refused, StoreUnavailable
from tests.engine.doubles import PATIENCE, operation_of, record_of, reservation

RECORD = record_of(reservation("key-1", owner="owner-1"), attempt=3)


def test_operation_shows_key_scope_attempt_owner_and_name() -> None:
    """Key, scope, attempt, owner and the route's name, as they stand in the record."""
    operation = Operation(RECORD, Policy(), "tenant-1")
    assert (operation.key, operation.scope, operation.attempt) == ("key-1", "tenant-1", 3)
    assert (operation.owner, operation.name) == ("owner-1", "POST /payments")
    assert not operation.lost


def test_a_downstream_key_is_the_same_for_ever() -> None:
    """Downstream systems remember these keys for longer than our releases live: this value may never change."""
    assert operation_of(RECORD).downstream_key("charge") == "oncekey-d8082f9198a0bb6017bbb9566bc0cb5b1972b3f3"


def test_a_downstream_key_is_the_same_for_every_attempt() -> None:
    """Another attempt, another owner, another state: the same call outside."""
    later = replace(RECORD, attempt=9, owner="owner-2", lease_until=0.0, last_error="x")
    assert operation_of(later).downstream_key("charge") == operation_of(RECORD).downstream_key("charge")


def test_a_downstream_key_differs_with_whatever_it_is_for() -> None:
    """Name, key, scope and fingerprint each make another one, and moving a character between them does too."""
    keys = [
        operation_of(record).downstream_key(name)
        for record, name in [
            (RECORD, "charge"),
            (RECORD, "refund"),
            (RECORD, ""),
            (replace(RECORD, key="key-2"), "charge"),
            (replace(RECORD, scope="tenant-2"), "charge"),
            (replace(RECORD, fingerprint=b"g" * 32), "charge"),
            (replace(RECORD, scope="tenant-1k", key="ey-1"), "charge"),
            (replace(RECORD, scope="tenant-", key="1key-1"), "charge"),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert all(one != two for one, two in pairwise(keys))


def test_a_downstream_key_does_not_show_the_clients_key() -> None:
    """It is safe to hand to others: neither the key nor the scope stands in it, and it is short plain ASCII."""
    shown = operation_of(replace(RECORD, key="secret-key", scope="acme")).downstream_key("charge")
    assert "secret" not in shown
    assert "acme" not in shown
    assert len(shown) == 48
    assert shown.isascii()


def test_refuse_before_any_verb_is_the_handlers_word() -> None:
    """Without it a handler has said nothing."""
    operation = operation_of(RECORD)
    words = [operation.word]
    operation.refuse()
    words.append(operation.word)
    assert (words, operation.begun) == ([None, "refused"], False)


def test_refuse_after_a_verb_raises() -> None:
    """A downstream key may have been used already: the key must not become unused."""
    operation = operation_of(RECORD)
    operation.downstream_key("charge")
    with pytest.raises(ApplicationError, match="refuse\\(\\) comes before any other verb"):
        operation.refuse()
    assert operation.word is None


def test_verb_after_refuse_begins_the_operation() -> None:
    """``judge`` discards a refused request only if it has not begun."""
    operation = operation_of(RECORD)
    operation.refuse()
    operation.downstream_key("charge")
    assert operation.begun


def test_not_executed_after_a_verb_is_the_handlers_word() -> None:
    """Only the handler knows that a charge was declined: unlike refuse() it may come at any time."""
    operation = operation_of(RECORD)
    operation.downstream_key("charge")
    operation.not_executed()
    assert operation.word == "not_executed"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (Refused("no"), "refused"),
        (NotExecuted("closed"), "not_executed"),
        (OutcomeUnknown("no answer"), "outcome_unknown"),
        (StoreUnavailable("down"), None),
        (RuntimeError("mistake"), None),
    ],
)
def test_raised_error_of_ours_is_the_handlers_word(error: Exception, word: str | None) -> None:
    """An exception of anything else says nothing."""
    operation = operation_of(RECORD)
    operation.evidence.entered()
    operation.evidence.raised_with(error, None)
    assert operation.word == word


def test_not_executed_of_a_step_is_not_the_word_of_the_request() -> None:
    """It speaks of that step. Earlier steps of the same request may have happened."""
    operation = operation_of(RECORD)
    error = NotExecuted("the second charge was declined")
    operation.steps = Steps()
    operation.steps.not_executed.append(error)
    operation.evidence.heard(error)
    assert operation.word is None


def test_current_is_the_operation_that_runs_here() -> None:
    """Inside a protected request it is that request's operation; in a thread of one's own there is none."""
    operation = operation_of(RECORD)
    token = _current.set(operation)
    try:
        assert current() is operation
        elsewhere: list[object] = []

        def ask() -> None:
            try:
                elsewhere.append(current())
            except NoOperation as error:
                elsewhere.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(PATIENCE)
        assert isinstance(elsewhere[0], NoOperation)
    finally:
        _current.reset(token)


def test_current_outside_a_request_raises_no_operation() -> None:
    """No operation: an error that is a LookupError too, and names the likely causes."""
    with pytest.raises(NoOperation, match="is the route protected") as caught:
        current()
    assert isinstance(caught.value, LookupError)


# ---------------------------------------------------------------- the request of a scope function


def test_headers_are_found_in_any_case_and_joined() -> None:
    lines = [(b"authorization", b"Bearer x"), (b"X-Tenant", b"acme"), (b"accept", b"a"), (b"accept", b"b")]
    request = Request("POST", "/payments", {"type": "http"}, lines)
    assert (request.method, request.path, request.raw) == ("POST", "/payments", {"type": "http"})
    headers = request.headers
    assert (headers["Authorization"], headers["x-tenant"], headers.get("Accept")) == ("Bearer x", "acme", "a, b")
    assert (headers.get("missing"), "X-TENANT" in headers, len(headers)) == (None, True, 3)
    assert list(headers) == ["authorization", "x-tenant", "accept"]
    assert "acme" not in repr(headers)


def test_single_tenant_says_its_name() -> None:
    """In a traceback or a repr it reads as it is written."""
    assert repr(SINGLE_TENANT) == "SINGLE_TENANT"


# ---------------------------------------------------------------- tokens


def test_owner_tokens_are_never_the_same() -> None:
    """Many threads of two engines take tokens at once: all are different."""
    makers = [Owners(), Owners()]
    taken: list[list[str]] = [[] for _ in range(8)]
    begin = threading.Barrier(8)

    def take(number: int) -> None:
        begin.wait(PATIENCE)
        taken[number] = [makers[number % 2].new() for _ in range(500)]

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len({token for tokens in taken for token in tokens}) == 4000


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other object of this process hears of the fork that a test plays."""
    monkeypatch.setattr(process, "_enrolled", WeakSet())


def test_a_forked_child_takes_other_tokens(alone: None) -> None:
    """Parent and child count from the same place, so the child has a random part of its own."""
    owners = Owners()
    before = owners.new()
    process._in_child()
    after = owners.new()
    assert before.rpartition("-")[0] != after.rpartition("-")[0]


def test_being_enrolled_for_forks_keeps_nothing_alive(alone: None) -> None:
    """An engine without a reference can be collected."""

    class Item:
        calls = 0

        def after_fork(self) -> None:
            Item.calls += 1

    item = Item()
    process.enroll(item)
    process._in_child()
    assert Item.calls == 1
    del item
    process._in_child()
    assert Item.calls == 1
