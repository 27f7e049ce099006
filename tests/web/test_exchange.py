"""The stages of a protected request: which may follow which, and what a shell sees of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.decision import Execute
from oncekey.core.problems import Answer
from oncekey.engine.flows import Finished
from oncekey.web.exchange import CUT_OFF, ENDED, HELD, READING, RUNNING, STORING, Exchange, Stage

FOLLOWS = {
    READING: {RUNNING},
    RUNNING: {STORING, HELD},
    STORING: {ENDED, HELD, CUT_OFF},
    HELD: {STORING},
    CUT_OFF: {ENDED},
    ENDED: set(),
}


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


def reserved(once: OnceKey) -> Exchange:
    route = once.routes.match("POST", "/pay")
    assert route is not None
    exchange = Exchange(once, route)
    assert exchange.admit([b"k-1"], None) is None
    exchange.reserve(once.single_tenant or "", ("POST", "/pay", b"", None, b"", lambda _: []), ())
    return exchange


def running(once: OnceKey) -> Exchange:
    exchange = reserved(once)
    decision = once.engine.run_blocking(exchange.begin(), 5.0)
    assert isinstance(decision, Execute)
    exchange.execute(decision, covered=False)
    return exchange


def stored(exchange: Exchange) -> Finished:
    exchange.start_storing()
    return exchange.once.engine.run_blocking(exchange.finish(), 5.0)


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("after", Stage)
def test_stage_follows_only_where_the_table_says_so(once: OnceKey, stage: Stage, after: Stage) -> None:
    exchange = reserved(once)
    exchange.stage = stage
    if after in FOLLOWS[stage]:
        exchange._enter(after)
        assert exchange.stage is after
    else:
        with pytest.raises(RuntimeError, match=f"from {stage.name} to {after.name}"):
            exchange._enter(after)
        assert exchange.stage is stage


def test_stored_response_ends_the_request_and_is_replayed(once: OnceKey) -> None:
    exchange = running(once)
    assert exchange.answered(201, [(b"location", b"/pay/1")], b"paid")
    exchange.finished(stored(exchange))
    assert (exchange.stage, exchange.instead) == (ENDED, None)
    assert (b"idempotency-key", b"k-1") in exchange.first_headers(201, [], 4)

    again = reserved(once)
    decision = once.engine.run_blocking(again.begin(), 5.0)
    assert again.answer_to(decision).body == b"paid"
    assert again.record is not None


def test_response_that_is_judged_twice_is_not_stored_twice(once: OnceKey) -> None:
    exchange = running(once)
    exchange.answered(201, [], b"paid")
    exchange.finished(stored(exchange))
    with pytest.raises(RuntimeError, match="from ENDED to STORING"):
        exchange.start_storing()


def test_response_that_could_not_be_stored_is_replaced_and_left_to_the_keeper(once: OnceKey) -> None:
    exchange = running(once)
    exchange.answered(201, [], b"paid")
    exchange.start_storing()
    exchange.not_stored()
    assert isinstance(exchange.instead, Answer)
    assert (exchange.stage, exchange.instead.status) == (ENDED, 503)
    once.engine.keeper.look()
    assert reserved_answer(once) == b"paid"


def test_cut_off_response_is_left_to_the_keeper_and_answered_later(once: OnceKey) -> None:
    exchange = running(once)
    exchange.answered(201, [], b"paid")
    exchange.start_storing()
    exchange.cut_off(adopt=True)
    assert (exchange.stage, exchange.instead) == (CUT_OFF, None)
    exchange.answer_cut_off()
    assert exchange.instead is not None
    assert (exchange.stage, exchange.instead.status) == (ENDED, 503)
    once.engine.keeper.look()
    assert reserved_answer(once) == b"paid"


def test_success_that_middleware_made_of_a_failure_is_replaced(once: OnceKey) -> None:
    exchange = running(once)
    exchange.answered(500, [], b"broken")
    exchange.finished(stored(exchange))
    exchange.changed_to(500)
    assert exchange.instead is None
    exchange.changed_to(200)
    assert exchange.instead is not None
    assert exchange.instead.status == 409


def test_end_of_a_stream_is_withheld_unless_it_is_stored(once: OnceKey) -> None:
    exchange = running(once)
    exchange.stream(200, [])
    assert exchange.streams
    exchange.answered(200, [], None)
    exchange.start_storing()
    exchange.not_stored()
    with pytest.raises(RuntimeError, match="withheld"):
        exchange.check_stream()


def reserved_answer(once: OnceKey) -> bytes:
    again = reserved(once)
    return again.answer_to(once.engine.run_blocking(again.begin(), 5.0)).body
