"""The checker itself: legal histories pass, broken ones do not, and it agrees with a search that tries everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.linearizable import LOOKS, Call, Key, Phase, Saw, illegal


def call(began: float, ended: float, saw: Saw, result: str | None = None, asked: str = "a") -> Call:
    return Call(asked, began, ended, saw, result)


E, R, B, M, U, N, D, L = (
    Saw.EXECUTED, Saw.REPLAYED, Saw.BUSY, Saw.MISMATCH, Saw.UNKNOWN, Saw.RELEASED, Saw.DOUBTED, Saw.LOST,
)  # fmt: skip

LEGAL = {
    "no request": [],
    "one after the other": [call(0, 1, E, "x"), call(2, 3, R, "x"), call(4, 5, R, "x")],
    "a duplicate while it runs": [call(0, 4, E, "x"), call(1, 2, B), call(5, 6, R, "x")],
    "answered late": [call(0, 9, E, "x"), call(1, 2, B), call(3, 4, R, "x")],
    "a duplicate that began first": [call(0, 3, B), call(1, 2, E, "x")],
    "a replay that waited": [call(0, 3, E, "x"), call(1, 2, R, "x")],
    "another request, always": [call(0, 4, E, "x"), call(1, 2, M, asked="b"), call(5, 6, M, asked="b")],
    "another request won": [call(0, 5, M), call(1, 2, E, "x", "b"), call(3, 4, R, "x", "b")],
    "tried again": [call(0, 1, N), call(2, 3, N), call(4, 5, E, "x"), call(6, 7, R, "x")],
    "another request is refused between two tries": [call(0, 1, N), call(2, 3, M, asked="b"), call(4, 5, E, "x")],
    "raised": [call(0, 4, D), call(1, 2, B), call(5, 6, U), call(7, 8, U)],
    "lost, and nothing had happened": [call(0, 1, L), call(2, 3, E, "x"), call(4, 5, R, "x")],
    "lost, and it had happened": [call(0, 1, L), call(2, 3, R, "x"), call(4, 5, R, "x")],
    "lost, and it goes on": [call(0, 1, L), call(2, 3, B), call(4, 5, B), call(6, 7, R, "x")],
    "lost, and given back": [call(0, 1, L), call(2, 3, B), call(4, 5, E, "x"), call(6, 7, R, "x")],
    "lost, given back, and used for another": [call(0, 1, L), call(2, 3, B), call(4, 5, E, "x", "b")],
    "lost, and never ended": [call(0, 1, L), call(2, 3, B), call(4, 5, U)],
    "lost, and it was another request": [call(0, 1, L, asked="b"), call(2, 3, M), call(4, 5, M)],
    "two were lost, and both had to be": [
        call(0, 1, L, asked="b"), call(0, 1, L), call(2, 3, M), call(4, 5, B), call(6, 7, R, "x"),
    ],
}  # fmt: skip

ILLEGAL = {
    "two ran": [call(0, 1, E, "x"), call(2, 3, E, "y")],
    "two ran at once": [call(0, 5, E, "x"), call(1, 4, E, "x")],
    "a replay of nothing": [call(0, 1, R, "x")],
    "a replay before the run began": [call(0, 1, R, "x"), call(2, 3, E, "x")],
    "another answer": [call(0, 1, E, "x"), call(2, 3, R, "y")],
    "two answers of a lost call": [call(0, 1, L), call(2, 3, R, "x"), call(4, 5, R, "y")],
    "busy after the end": [call(0, 1, E, "x"), call(2, 3, B)],
    "busy between two replays": [call(0, 9, E, "x"), call(1, 2, R, "x"), call(3, 4, B)],
    "busy, and no request was running": [call(0, 1, B), call(2, 3, E, "x")],
    "busy for another request": [call(0, 5, E, "x", "b"), call(1, 2, B)],
    "another request got the answer": [call(0, 1, E, "x"), call(2, 3, R, "x", "b")],
    "another request ran": [call(0, 1, N), call(2, 3, E, "x", "b")],
    "refused for nothing": [call(0, 1, M), call(2, 3, E, "x")],
    "refused for the same request": [call(0, 1, E, "x"), call(2, 3, M)],
    "unknown, and it is known": [call(0, 1, E, "x"), call(2, 3, U)],
    "ran after a doubt": [call(0, 1, D), call(2, 3, E, "x")],
    "ran after a lost call was replayed": [call(0, 1, L), call(2, 3, R, "x"), call(4, 5, E, "y")],
    "lost only later": [call(0, 1, R, "x"), call(2, 3, L)],
    "one lost call cannot be two": [call(0, 1, L), call(2, 3, B), call(4, 5, M, asked="b"), call(6, 7, B, asked="b")],
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_history_is_accepted(name: str) -> None:
    assert illegal(LEGAL[name]) is None


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_history_is_refused(name: str) -> None:
    assert illegal(ILLEGAL[name]) is not None


def test_illegal_history_names_the_call_that_does_not_fit() -> None:
    said = illegal([replace(call(0, 1, E, "x"), client="anna"), replace(call(2, 3, B), client="bob")]) or ""
    assert "with the key completed it cannot be the turn of bob (409 in progress)" in said
    assert "0.000 to  1000.000 ms          anna asked a: executed 'x'" in said


# ---------------------------------------------------------------- against a search that tries everything


def everything(waiting: frozenset[int], key: Key, calls: list[Call]) -> bool:
    """No shortcuts: any call whose turn it is, any point, in any order."""
    if all(calls[number].saw is L for number in waiting):
        return True
    now = min(calls[number].until for number in waiting)
    turns = [number for number in waiting if calls[number].began <= now]
    after: list[tuple[frozenset[int], Key]] = []
    for number in turns:
        each = calls[number]
        if number == key.owner:
            after += [(waiting - {number}, end) for end in key.settled(each)]
        elif each.saw in LOOKS and (seen := key.looked(each)) is not None:
            after.append((waiting - {number}, seen))
        elif (taken := key.reserved(each, number)) is not None:
            after.append((waiting, taken))
    return any(everything(*position, calls) for position in after)


times = st.tuples(st.integers(0, 12), st.integers(1, 8))
calls = st.builds(
    lambda time, saw, result, asked: call(
        time[0], time[0] + time[1], saw, result if saw in (E, R) else None, asked
    ),
    times, st.sampled_from(list(Saw)), st.sampled_from("xxxy"), st.sampled_from("aaab"),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(calls, max_size=6))
def test_checker_agrees_with_an_exhaustive_search(history: list[Call]) -> None:
    assert (illegal(history) is None) == everything(frozenset(range(len(history))), Key(), history)


# ---------------------------------------------------------------- histories of a key that behaves, and what breaks them


def lived(chance: random.Random, clients: int) -> list[Call]:
    """What clients of a right implementation may see: they come and go while a key is moved under their eyes."""
    key, history, now = Key(), [], 0.0
    open_calls: dict[int, tuple[str, float]] = {}
    to_come = clients
    while open_calls or to_come:
        now += 1.0
        if to_come and (not open_calls or chance.random() < 0.5):
            open_calls[to_come] = (chance.choice("aaab"), now)
            to_come -= 1
            continue
        number = chance.choice(list(open_calls))
        asked, began = open_calls[number]
        # A cut says nothing. A call that has reserved goes on, and its end is not seen.
        if chance.random() < 0.1:
            history.append(Call(asked, began, now, L))
            del open_calls[number]
            if key.owner == number:
                key = chance.choice(list(key.settled(Call(asked, began, now, L))))
                if key.phase is Phase.COMPLETED:
                    key = replace(key, result=f"of {number}")
            continue
        if key.owner == number:
            saw = chance.choice((E, E, N, D))
            end = Call(asked, began, now, saw, f"of {number}" if saw is E else None)
            key = next(key.settled(end))
        elif (taken := key.reserved(Call(asked, began, now, E), number)) is not None:
            key = taken
            continue
        else:
            looks = [Call(asked, began, now, saw, key.result if saw is R else None) for saw in LOOKS]
            end = next(look for look in looks if key.looked(look) is not None)
        history.append(replace(end, ended=now + chance.random()))
        del open_calls[number]
    return history


def broken(chance: random.Random, history: list[Call]) -> list[Call] | None:
    """The same with one lie in it that no order can explain; None: it has no place for this one."""
    done = [each for each in history if each.saw in (E, R)]
    last = max((each.ended for each in history), default=0.0) + 1.0
    lie = chance.choice(("second run", "other bytes", "busy for ever", "leak", "rerun"))
    if lie == "rerun" and any(each.saw is U for each in history):
        return [*history, Call("a", last, last + 1, E, "twice"), Call("b", last, last + 1, E, "twice")]
    if not done:
        return None
    one = chance.choice(done)
    match lie:
        case "second run":
            return [*history, Call(one.asked, last, last + 1, E, "twice")]
        case "other bytes":
            return [*history, Call(one.asked, last, last + 1, R, "other")]
        case "busy for ever":
            return [*history, Call(one.asked, last, last + 1, B)]
        case "leak":
            return [*history, Call(one.asked + "'", last, last + 1, R, one.result)]
    return None


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_real_history_is_legal_and_a_falsified_one_is_not(seed: int, clients: int) -> None:
    chance = random.Random(seed)
    history = lived(chance, clients)
    assert illegal(history) is None
    lied = broken(chance, history)
    assert lied is None or illegal(lied) is not None


def test_64_clients_are_checked_quickly() -> None:
    """The crowd: one runs, some leave, the others are told to wait or get its answer."""
    chance = random.Random(7)
    history = [call(0, 50, E, "x")]
    for _ in range(63):
        began = chance.uniform(0, 100)
        saw = chance.choice((B, B, L, M)) if began < 40 else chance.choice((R, L, M))
        ended = began + (5 if began < 40 else 20)
        history.append(call(began, ended, saw, "x" if saw is R else None, "b" if saw is M else "a"))
    history = [each if not (each.saw is R and each.began < 30) else replace(each, ended=60) for each in history]
    assert illegal(history) is None
    assert illegal([*history, call(200, 201, B)]) is not None
