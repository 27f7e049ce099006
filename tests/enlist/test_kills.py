"""kill -9 at every named point of an enlisted request, and owners that are paused: row and key always agree."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.states import State
from tests.enlist.killed_apps import BAD, GOOD, POINTS, child, run
from tests.enlist.shop import Shop
from tests.web.apps import until

_DEPTH: dict[str, Any] = {
    "flask-sqlalchemy": (),
    "fastapi-yield": pytest.mark.faults,
    "django": pytest.mark.frameworks,
    "django-asgi": pytest.mark.frameworks,
}


_PAST = {
    "sqlite": "0",
    "postgresql": "now() - interval '1 second'",
    "mysql": "utc_timestamp(6) - INTERVAL 1 SECOND",
}


def let_the_lease_end(shop: Shop) -> None:
    past = _PAST[shop.kind]
    shop.ask(f"UPDATE idempotency_keys SET lease_until = {past} WHERE state = 'in_progress'")


def agree(shop: Shop) -> None:
    """The business row is there exactly when the key says that it is."""
    assert (shop.payments(), shop.state()) in (
        (0, State.IN_PROGRESS),
        (0, State.FAILED_RETRYABLE),
        (1, State.COMPLETED),
    )


@pytest.mark.parametrize(
    ("toy", "point"),
    [
        # Every point of the one here, of Django in `make frameworks`, and of the others in `make faults`, which kills
        # at each of them anyway.
        pytest.param(toy, point, marks=_DEPTH[toy])
        for toy, point in product(GOOD, POINTS)
    ],
)
async def test_process_killed_at_a_point_pays_once(shop: Shop, toy: str, point: str) -> None:
    assert run(toy, shop.url, f"kill:{point}") is None
    agree(shop)
    done = shop.state() is State.COMPLETED
    assert done is (point in ("committed", "answered"))
    let_the_lease_end(shop)
    first = run(toy, shop.url)
    assert first is not None
    assert first[0] == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert run(toy, shop.url) == first


@pytest.mark.faults
@pytest.mark.timeout(1200)
async def test_process_killed_twenty_times_at_a_point_pays_once(shop: Shop) -> None:
    """Every point, twenty times, each with a fresh key's worth of table."""
    for number, (toy, point) in enumerate(list(product(GOOD, POINTS)) * 20, 1):
        shop.ask("DELETE FROM idempotency_keys")
        shop.ask("DELETE FROM payments")
        await test_process_killed_at_a_point_pays_once(shop, toy, point)
        print(f"\r{number} kills", end="")


@pytest.mark.parametrize(
    ("toy", "point"),
    [
        *product(BAD, POINTS[2:3]),
        *[pytest.param(toy, point, marks=pytest.mark.faults) for toy, point in product(BAD, POINTS[:2])],
        ("with-session", "completing"),
    ],
)
async def test_misused_transaction_killed_at_a_point_completes_nothing(shop: Shop, toy: str, point: str) -> None:
    """The transaction is not what it was when the request ends: refused, nothing written, nothing completed."""
    assert run(toy, shop.url, f"kill:{point}") is None
    agree(shop)
    let_the_lease_end(shop)
    again = run(toy, shop.url)
    assert again is not None
    assert again[0] == (503 if toy == "with-session" else 500)
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("toy", [GOOD[0], *(pytest.param(toy, marks=pytest.mark.faults) for toy in GOOD[1:])])
async def test_owner_paused_before_enlist_writes_nothing(shop: Shop, toy: str) -> None:
    """SIGSTOP past the lease, a second attempt that completes, SIGCONT: the first writes nothing, and replays."""
    with child(toy, shop.url, "stop:begun") as paused:
        await until(lambda: is_stopped(paused.process.pid), "stopped")
        let_the_lease_end(shop)
        second = run(toy, shop.url)
        assert second is not None
        assert second[0] == 201
        assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
        resume(paused.process.pid)
        assert paused.answer() == second
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)


async def test_owner_paused_inside_its_transaction_completes(postgres_shop: Shop) -> None:
    """PostgreSQL: the row's lock outlives the lease. No request takes over, and the first one ends as it would have."""
    toy = "fastapi-yield"
    with child(toy, postgres_shop.url, "stop:written") as paused:
        await until(lambda: is_stopped(paused.process.pid), "stopped")
        second = run(toy, postgres_shop.url)
        assert second is not None
        assert second[0] == 409
        resume(paused.process.pid)
        first = paused.answer()
        assert first is not None
        assert first[0] == 201
    assert (postgres_shop.payments(), postgres_shop.state()) == (1, State.COMPLETED)


def is_stopped(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def resume(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
