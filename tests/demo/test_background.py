"""``oncekey demo --background``: 202 at once, a worker that settles, and the status endpoint, over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.demo.conftest import MakeDemo
from tests.demo.process import Demo

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def demo(make_demo: MakeDemo) -> Demo:
    return make_demo("--background")


def settled(demo: Demo, key: str) -> httpx.Response:
    """The status of a key once it is no longer 202."""

    def asked() -> httpx.Response | None:
        answer = demo.status(key)
        return None if answer.status_code == 202 else answer

    answer = demo.until(asked, f"{key} was never settled")
    assert answer is not None
    return answer


def test_202_and_then_the_same_201_for_all(demo: Demo) -> None:
    """While the worker is at it every retry is 202; then every one is the worker's answer."""
    first, second = (demo.pay("slow-0001", 101, simulate="slow") for _ in range(2))
    assert (first.status_code, second.status_code) == (202, 202)
    for answer in (first, second):
        assert answer.headers["location"] == "/idempotency/slow-0001"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["idempotency-key"] == "slow-0001"
    assert "idempotency-replayed" not in second.headers
    payment = first.json()
    assert payment["status"] == "pending"
    assert [row for row in demo.payments() if row["id"] == payment["id"]] == [payment]
    waiting = demo.http.get(first.headers["location"], headers={"Authorization": "Bearer tenant-a"})
    assert (waiting.status_code, waiting.headers["location"]) == (202, "/idempotency/slow-0001")
    assert "retry-after" in waiting.headers
    done = settled(demo, "slow-0001")
    assert (done.status_code, done.json()) == (201, payment | {"status": "succeeded"})
    for _ in range(3):
        again = demo.pay("slow-0001", 101, simulate="slow")
        assert (again.status_code, again.content) == (201, done.content)
        assert again.headers["location"] == f"/payments/{payment['id']}"
        assert again.headers["idempotency-replayed"] == "true"
    assert len(demo.charges(101)) == 1
    listed = demo.http.get(done.headers["location"], headers={"Authorization": "Bearer tenant-a"})
    assert listed.json() == done.json()


def test_another_body_is_422_while_it_is_pending(demo: Demo) -> None:
    """A deferred key is taken as any other."""
    assert demo.pay("mismatch-0001", 102, simulate="slow").status_code == 202
    assert demo.pay("mismatch-0001", 103, simulate="slow").status_code == 422


def test_key_of_another_tenant_looks_unused(demo: Demo) -> None:
    """A key that was never sent and one of another tenant look the same."""
    demo.pay("tenants-0001", 104)
    theirs, never = demo.status("tenants-0001", "tenant-b"), demo.status("never-0001", "tenant-b")
    assert (theirs.status_code, never.status_code, theirs.content) == (404, 404, never.content)
    assert demo.status("tenants-0001", "tenant-c").status_code == 401


def test_a_decline_is_the_final_answer(demo: Demo) -> None:
    """The worker says how it ended, good or bad."""
    assert demo.pay("decline-0001", 105, simulate="decline").status_code == 202
    done = settled(demo, "decline-0001")
    assert done.status_code == 402
    again = demo.pay("decline-0001", 105, simulate="decline")
    assert (again.status_code, again.content) == (402, done.content)
    assert [row["status"] for row in demo.payments() if row["amountCents"] == 105] == ["declined"]
    assert demo.charges(105) == []


def test_a_dead_letter_is_unknown(demo: Demo) -> None:
    """The worker gave the job up: whether it happened is not known."""
    assert demo.pay("timeout-0001", 106, simulate="timeout").status_code == 202
    status = settled(demo, "timeout-0001")
    again = demo.pay("timeout-0001", 106, simulate="timeout")
    for answer in (status, again):
        assert (answer.status_code, "outcome-unknown" in answer.text) == (409, True)
        assert "retry-after" in answer.headers


def test_an_error_before_anything_happened(demo: Demo) -> None:
    """Nothing is enqueued, and the retry is attempt 2; the status says to send it again."""
    assert demo.pay("error-0001", 107, simulate="error").json()["attempt"] == 1
    status = demo.status("error-0001")
    assert (status.status_code, "status-retryable" in status.text) == (409, True)
    assert demo.pay("error-0001", 107, simulate="error").json()["attempt"] == 2
    assert [row for row in demo.payments() if row["amountCents"] == 107] == []


def test_large_response_of_the_worker_leaves_a_tombstone(demo: Demo) -> None:
    """What the worker answers may be too large to keep as well."""
    demo.pay("large-0001", 108, simulate="large")
    done = settled(demo, "large-0001")
    assert (done.status_code, "was not kept" in done.text) == (201, True)
    assert done.headers["location"].startswith("/payments/pay_")


def test_the_worker_is_killed_after_the_charge(demo: Demo) -> None:
    """Another one takes the job up when the lease is over, and the provider knows its key."""
    assert demo.pay("crash-0001", 109, simulate="crash").status_code == 202
    done = settled(demo, "crash-0001")
    assert (done.status_code, done.json()["status"]) == (201, "succeeded")
    assert len(demo.charges(109)) == 1
    assert "the worker was killed (signal 9)" in demo.log.read_text()


def test_the_worker_is_killed_and_the_provider_knows_no_keys(make_demo: MakeDemo) -> None:
    """It may not be asked again: unknown, until its ledger says that it was charged, and one charge."""
    demo = make_demo("--background", "--no-provider-honours")
    assert demo.pay("fine-0001", 110).status_code == 202
    assert settled(demo, "fine-0001").status_code == 201
    demo.pay("crash-0001", 111, simulate="crash")
    done = demo.retry_until(201, "succeeded", "crash-0001", 111, "crash")
    assert done.headers["location"] == f"/payments/{done.json()['id']}"
    assert demo.audit("crash-0001") == [("reconciler", "unknown", "completed")]
    assert [payment["status"] for payment in demo.payments() if payment["amountCents"] == 111] == ["succeeded"]
    assert (len(demo.charges(110)), len(demo.charges(111))) == (1, 1)


def test_forty_payments_at_once_are_charged_once_each(demo: Demo) -> None:
    """Forty payments by forty clients: each is accepted, and each is charged once."""
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda number: demo.pay(f"many-{number:04d}", 2000 + number), range(40)))
    assert {answer.status_code for answer in answers} == {202}
    for number, answer in enumerate(answers):
        assert settled(demo, f"many-{number:04d}").json() == answer.json() | {"status": "succeeded"}
        assert len(demo.charges(2000 + number)) == 1


def test_everything_is_killed_while_it_is_pending(demo: Demo) -> None:
    """A job that was committed is done, by a later worker."""
    first = demo.pay("power-0001", 112, simulate="slow")
    demo.kill()
    demo.start()
    done = settled(demo, "power-0001")
    assert (done.status_code, done.json()) == (201, first.json() | {"status": "succeeded"})
    assert len(demo.charges(112)) == 1
