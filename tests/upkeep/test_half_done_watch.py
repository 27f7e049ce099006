"""Half-done keys that wait, because no resume function is registered for their operation: the log names them."""

from __future__ import annotations

import pytest

from oncekey.core.health import WAITING_SECONDS
from oncekey.upkeep import Reconciler, Resumer
from oncekey.upkeep.waiting import HalfDoneWatch
from tests.upkeep.key_store import LEASE, KeyStore


@pytest.mark.parametrize("other", [False, True])
def test_half_done_keys_without_a_function_are_logged_by_operation(
    rows: KeyStore, caplog: pytest.LogCaptureFixture, other: bool
) -> None:
    """Also if the app has registered no function at all, and once in an hour."""
    rows.half_done(3, operation="POST /rides")
    once = rows.once(effects="phased")
    if other:
        once.resume("POST /orders", lambda op: (201, {}))
    rows.age(LEASE + WAITING_SECONDS + 1)
    resumer = Resumer(once)
    resumer.run()
    resumer.run()
    resumer.close()
    (said,) = [each.getMessage() for each in caplog.records if "half done" in each.getMessage()]
    assert said.startswith(
        "3 keys are half done for over 10 min and no resume function is registered for POST /rides: "
    )
    assert "once.resume('POST /rides', fn)" in said
    assert caplog.records[-1].levelname == "WARNING"


def test_half_done_keys_with_a_function_are_not_logged(rows: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    rows.half_done(operation="POST /rides")
    rows.age(LEASE + WAITING_SECONDS + 1)
    once = rows.once(effects="phased")
    once.resume("POST /rides", lambda op: (201, {}))
    HalfDoneWatch(once.store, once.resumes).look()
    assert caplog.text == ""


def test_operation_is_logged_again_after_an_hour_or_with_many_more_keys(
    rows: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    once = rows.once()
    watch = HalfDoneWatch(once.store, once.resumes, lambda: now)
    rows.half_done()
    rows.age(LEASE + WAITING_SECONDS + 1)
    seen = []
    for at, more in ((0.0, 0), (1.0, 9), (61.0, 0), (122.0, 0), (3700.0, 0)):
        now = at
        if more:
            rows.half_done(more)
            rows.age(LEASE + WAITING_SECONDS + 1)
        watch.look()
        seen.append(len(caplog.records))
    assert seen == [1, 1, 2, 2, 3], "at most once a minute; then because there are many more; then after an hour"


def test_keys_of_one_route_are_logged_together_and_without_their_paths(
    rows: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients invent paths, and paths have personal data."""
    for number in range(3):
        rows.half_done(operation=f"POST /und/ann{number}@example.org")
        rows.unknown(operation=f"POST /und/ann{number}@example.org")
    rows.age(LEASE + WAITING_SECONDS + 1)
    once = rows.once(effects="phased")
    once.engine.know_routes(lambda: ["POST /und/{token}"])
    resumer, reconciler = Resumer(once), Reconciler(once)
    resumer.run()
    reconciler.run()
    resumer.close()
    reconciler.close()
    told = [each.getMessage() for each in caplog.records if " is registered for " in each.getMessage()]
    assert [line.partition(" is registered for ")[2].partition(":")[0] for line in told] == ["POST /und/{token}"] * 2
    assert [line.partition(" ")[0] for line in told] == ["3", "3"]
    assert "example.org" not in "".join(told)
