"""What the tests of lanes share: work that is submitted, asked for, and found."""

from __future__ import annotations

from collections.abc import Callable

from oncekey.core.record import Found
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import SyncTicket, Work
from tests.engine.doubles import PATIENCE

Open = Callable[..., Router]


def submit(router: Router, *work: Work) -> list[SyncTicket]:
    tickets = [SyncTicket(item) for item in work]
    for ticket in tickets:
        router.submit(ticket)
    return tickets


def ask(router: Router, work: Work) -> object:
    (ticket,) = submit(router, work)
    return ticket.wait(PATIENCE)


def owner_found(found: object) -> str:
    assert isinstance(found, Found)
    assert found.record is not None
    return found.record.owner
