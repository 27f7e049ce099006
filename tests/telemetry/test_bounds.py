"""Bounds of labels: who has a series, and that their number stays what was asked for."""

from __future__ import annotations

import random

from oncekey.telemetry.bounds import OTHER, WINDOW_SECONDS, Busiest, FirstSeen


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_first_values_keep_their_names() -> None:
    bound = FirstSeen(2)
    assert [bound.label(text) for text in "abcab"] == ["a", "b", OTHER, "a", "b"]


def test_request_has_the_label_of_its_route_and_other_without_one() -> None:
    bound = FirstSeen(2)
    bound.know(["POST /pay", "POST /orders/{id:int}/cancel", "POST /files/{at:path}", "POST /bad{brace"])
    assert {bound.label(f"POST /orders/{n}/cancel") for n in range(2000)} == {"POST /orders/{id}/cancel"}
    assert {bound.label(f"POST /wp-admin/{n}") for n in range(2000)} == {OTHER}
    assert bound.label("POST /orders/{id}/cancel") == "POST /orders/{id}/cancel"  # of a declared handler
    assert bound.label("GET /pay") == OTHER
    assert bound.label("charge") == "charge"  # a function: not a path
    assert bound.label("POST /files/a/b") == OTHER  # the limit holds
    assert len(bound._remembered) <= 1000


def test_name_is_cut_and_has_no_lone_surrogates() -> None:
    bound = FirstSeen(3)
    assert bound.label("POST /caf\udce9") == "POST /caf?"
    assert bound.label("POST /caf\udce9") == "POST /caf?"
    assert len(bound.label("POST /" + "x" * 8000)) == 200


def test_busy_tenant_takes_the_place_of_an_idle_one_after_a_window() -> None:
    clock = Clock()
    freed: list[str] = []
    bound = Busiest(2, freed.append, clock=clock)
    for tenant in ("first", "second"):
        assert bound.label(tenant) == tenant
    for _ in range(10):
        bound.label("first")
        assert bound.label("busy") == OTHER
    clock.now += WINDOW_SECONDS
    assert bound.label("busy") == "busy"
    assert freed == ["second"]
    assert bound.label("second") == OTHER


def test_tenant_keeps_its_place_against_one_that_is_only_a_little_busier() -> None:
    clock = Clock()
    freed: list[str] = []
    bound = Busiest(1, freed.append, clock=clock)
    for _ in range(10):
        bound.label("first")
    for _ in range(15):
        bound.label("rival")
    clock.now += WINDOW_SECONDS
    assert bound.label("rival") == OTHER
    assert freed == []


def test_places_are_fixed_where_series_cannot_be_dropped() -> None:
    clock = Clock()
    freed: list[str] = []
    bound = Busiest(1, freed.append, clock=clock, fixed=True)
    bound.label("first")
    for _ in range(50):
        bound.label("busy")
    clock.now += 10 * WINDOW_SECONDS
    assert bound.label("busy") == OTHER
    assert freed == []


def test_memory_and_series_stay_bounded_under_a_flood_of_tenants() -> None:
    clock = Clock()
    alive: set[str] = set()
    bound = Busiest(5, alive.discard, clock=clock)
    chance = random.Random(7)
    for _ in range(20_000):
        clock.now += 1.0
        tenant = chance.choice(("big-1", "big-2", f"small-{chance.random()}"))
        label = bound.label(tenant)
        if label != OTHER:
            alive.add(label)
        assert len(alive) <= 5
        assert len(bound._candidates) <= 20
    assert {"big-1", "big-2"} <= alive
