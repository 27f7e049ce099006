"""An owner that is paused past its lease (SIGSTOP), a second attempt that ends, SIGCONT: the first one writes nothing.

On SQLite paused where it holds no transaction: inside of one it blocks every writer, and that is not promised.
"""

from __future__ import annotations

import os
import signal
from itertools import count

import pytest

from oncekey.core.states import State
from oncekey.testing.company import Child
from tests.engine.doubles import eventually
from tests.faults.pointed import Case, Town, fault, one_request, settle

_numbers = count(1)

PAUSED: tuple[tuple[str, str, str, dict[str, bool]], ...] = (
    ("/orders", "request.begin", "after", {}),
    ("/orders", "enlist", "before", {}),
    ("/orders", "enlist.open", "before", {}),
    ("/background", "enlist", "before", {}),
    ("/rides", "phase", "before", {"honours": True}),
    ("/rides", "enlist.open", "before", {"honours": True}),
    ("/rides", "phase.commit", "after", {"honours": True}),
    ("/rides", "effect.intent", "before", {"honours": True}),
    ("/rides", "effect.intent", "before", {"honours": False}),
    ("/rides", "effect.call", "before", {"honours": True}),
    ("/rides", "effect.result", "before", {"honours": True}),
    ("/rides", "effect.result", "after", {"honours": False}),
    ("/rides", "enlist.open:2", "before", {"honours": False}),
    ("/rides", "request.finish", "before", {"honours": True}),
)
IN_DOUBT: tuple[tuple[str, str], ...] = (
    ("effect.intent", "after"),
    ("effect.call", "before"),
    ("effect.call", "after"),
)


class Paused:
    """A process that stands still at its point."""

    def __init__(self, town: Town, path: str, point: str, when: str, body: dict[str, bool]) -> None:
        self.what = f"{path} paused {when} {point}, {body}"
        self.case: Case = (path, f"key-{next(_numbers):05d}", body)
        self.child: Child = one_request(town, self.case, fault(point, when, "stop"))
        _, status = os.waitpid(self.child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"{self.what}: never came to its point"

    @property
    def key(self) -> str:
        return self.case[1]

    def resume(self) -> tuple[int, str]:
        """Let it go on to its end: what its client got."""
        os.kill(self.child.pid, signal.SIGCONT)
        status, body = self.child.result()
        return status, body


@pytest.mark.timeout(120)
def test_paused_past_the_lease(town: Town) -> None:
    """Another attempt completes meanwhile. The late one adds no row and no charge, and its client learns the truth."""
    paused = [Paused(town, *where) for where in PAUSED]
    answers = settle(town, [each.case for each in paused])
    before = town.bank.charges()
    for each in paused:
        final = tuple(answers[each.key][0])
        assert final[0] == 201, each.what
        assert each.resume() in (final, (202, final[1])), each.what
    rows = town.rows("orders") + town.rows("rides") + town.rows("background")
    for each in paused:
        assert rows[each.key] == 1, each.what
        assert town.state(each.key) is State.COMPLETED, each.what
    assert town.bank.charges() == before == {each.key: 1 for each in paused}


@pytest.mark.timeout(120)
def test_paused_while_it_is_in_doubt(town: Town) -> None:
    """Around the call of an effect that may not be repeated: nobody calls it again, and the key is unknown for good."""
    paused = [Paused(town, "/rides", point, when, {"honours": False}) for point, when in IN_DOUBT]
    answers = settle(town, [each.case for each in paused])
    for each in paused:
        assert answers[each.key] == [[409, "unknown"]], each.what
        status, body = each.resume()
        assert (status, "outcome-unknown" in body) == (409, True), each.what
        assert town.state(each.key) is State.UNKNOWN, each.what
    assert town.bank.charges() == {each.key: 1 for each in paused}  # the paused one's own
    assert not town.rows("receipts")


@pytest.mark.parametrize("point", ["enlist.guard:after", "enlist.complete:before", "enlist.commit:before"])
@pytest.mark.timeout(120)
def test_paused_inside_its_transaction(postgres_town: Town, point: str) -> None:
    """PostgreSQL: the lock on the row outlives the lease. Nobody takes over, and the first one ends as it would."""
    town = postgres_town
    name, _, when = point.partition(":")
    paused = [Paused(town, path, name, when, {"honours": False}) for path in ("/orders", "/rides")]
    over = "SELECT count(*) FROM idempotency_keys WHERE lease_until < clock_timestamp()"
    eventually(lambda: town.ask(over) == [(2,)], "the leases are over")
    for each in paused:
        assert one_request(town, each.case).result()[0] == 409, each.what
    firsts = [each.resume() for each in paused]
    answers = settle(town, [each.case for each in paused])
    for each, first in zip(paused, firsts, strict=True):
        assert first[0] == 201, (each.what, first)
        assert tuple(answers[each.key][0]) == first
    assert town.bank.charges() == {each.key: 1 for each in paused}
    assert town.rows("orders") + town.rows("rides") == {each.key: 1 for each in paused}
