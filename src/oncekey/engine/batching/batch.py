"""Splits tickets into batches for the store. A key is in a batch at most once, and a batch has a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from oncekey.core.record import Reservation
from oncekey.core.swaps import Swap
from oncekey.engine.batching.ticket import Ticket

MAX_BATCH = 256
"""Rows in one statement: past this, more rows no longer make a commit cheaper per row."""
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Stored bodies in one statement, so that 256 large ones do not become one enormous message."""

_T = TypeVar("_T", bound=Ticket)


def rounds(tickets: Sequence[_T]) -> Iterator[list[list[_T]]]:
    """Split the tickets into rounds in which each key is once. A round is a list of **places**: tickets for one row.

    Tickets that *reserve* the same key share a place. The store gets the first of them, and all get its result. The
    owner token in that result is the first ticket's, so only the first caller runs its handler.
    """
    while tickets:
        places: dict[tuple[str, str], list[_T]] = {}
        later = []
        for ticket in tickets:
            work = ticket.work
            at = work if isinstance(work, tuple) else (work.scope, work.key)
            place = places.get(at)
            if place is None:
                places[at] = [ticket]
            elif isinstance(work, Reservation):
                place.append(ticket)
            else:
                later.append(ticket)
        yield list(places.values())
        tickets = later


def pieces(places: list[list[_T]]) -> Iterator[list[list[_T]]]:
    """Split the places of a round, all of one kind, into pieces that fit into one statement."""
    if len(places) <= MAX_BATCH and isinstance(places[0][0].work, Reservation):  # reservations are small
        yield places
        return
    piece: list[list[_T]] = []
    size = 0
    for place in places:
        work = place[0].work
        if isinstance(work, Swap) and work.response is not None and work.response.body is not None:
            size += len(work.response.body)
        piece.append(place)
        if len(piece) >= MAX_BATCH or size >= MAX_BATCH_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def batches(tickets: Sequence[_T]) -> Iterator[list[list[_T]]]:
    """Split the tickets into batches of places; each batch fits into one statement."""
    for places in rounds(tickets):
        yield from pieces(places)
