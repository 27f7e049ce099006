"""The demo, for real: over HTTP, on SQLite and on PostgreSQL, killed and started again."""

from __future__ import annotations

import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import Any

import httpx
import psycopg
import pytest

from tests.demo.conftest import MakeDemo
from tests.demo.process import Demo


@pytest.fixture(scope="module")
def demo(make_demo: MakeDemo) -> Demo:
    return make_demo()


def test_identical_twice_is_one_payment_and_one_answer(demo: Demo) -> None:
    """The second answer is the first one, byte for byte, marked as a replay."""
    before = len(demo.payments())
    first, second = demo.pay("twice-0001"), demo.pay("twice-0001")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert first.headers["location"] == second.headers["location"] == f"/payments/{first.json()['id']}"
    assert set(first.json()) == {"id", "status", "customerId", "amountCents", "currency"}
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert len(demo.payments()) == before + 1
    path = first.headers["location"]
    assert demo.http.get(path, headers={"Authorization": "Bearer tenant-a"}).json() == first.json()


def test_another_body_is_422(demo: Demo) -> None:
    """A key is one request."""
    assert demo.pay("other-0001", 100).status_code == 201
    assert demo.pay("other-0001", 200).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        "NaN",
        "[Infinity]",
        '{"customerId":"c","amountCents":NaN,"currency":"EUR"}',
        '{"customerId":"\\ud800","amountCents":5,"currency":"EUR"}',
    ],
)
def test_body_that_json_cannot_repeat_is_422_and_leaves_key_unused(demo: Demo, body: str) -> None:
    """FastAPI's own handler answers these with a 500, since it repeats the input."""
    headers = {"Authorization": "Bearer tenant-a", "Idempotency-Key": "nan-0001", "Content-Type": "application/json"}
    answer = demo.http.post("/payments", headers=headers, content=body)
    assert (answer.status_code, set(answer.json()["detail"][0])) == (422, {"type", "loc", "msg"})
    assert demo.status("nan-0001").status_code == 404


def test_order_and_white_space_do_not_matter(demo: Demo) -> None:
    """The same JSON in other clothes is the same request."""
    headers = {"Authorization": "Bearer tenant-a", "Idempotency-Key": "space-0001", "Content-Type": "application/json"}
    one = demo.http.post("/payments", headers=headers, content='{"customerId":"c","amountCents":5,"currency":"EUR"}')
    two = demo.http.post(
        "/payments", headers=headers, content='{ "currency": "EUR",\n "amountCents": 5, "customerId": "c" }'
    )
    assert (one.status_code, two.status_code) == (201, 201)
    assert one.content == two.content


def test_one_key_of_two_tenants_is_two_payments_and_others_get_401(demo: Demo) -> None:
    """One key, two tenants, two payments; every other caller is 401."""
    ours, theirs = demo.pay("tenants-0001"), demo.pay("tenants-0001", tenant="tenant-b")
    assert (ours.status_code, theirs.status_code) == (201, 201)
    assert ours.json()["id"] != theirs.json()["id"]
    assert [payment["id"] for payment in demo.payments("tenant-b")].count(ours.json()["id"]) == 0
    assert demo.http.get(ours.headers["location"], headers={"Authorization": "Bearer tenant-b"}).status_code == 404
    assert demo.pay("tenants-0001", tenant="tenant-c").status_code == 401
    assert demo.http.get("/payments").status_code == 401


def test_no_key_is_400_and_get_needs_none(demo: Demo) -> None:
    """Protected means required; reading needs no key."""
    before = demo.payments()
    assert demo.pay(None).status_code == 400
    assert demo.payments() == before


def test_fifty_at_once_are_one_payment(demo: Demo) -> None:
    """One of fifty runs; the others are told to come back, or get its answer."""
    before = len(demo.payments())
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: demo.pay("fifty-0001", 50), range(50)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 409)
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert len(demo.payments()) == before + 1


def test_slow_is_409_for_the_duplicate_and_422_for_another_body(demo: Demo) -> None:
    """While one of two is running, the other is told to come back; a mismatch is told so at once."""
    with ThreadPoolExecutor(2) as pool:
        twins = [pool.submit(demo.pay, "slow-0001", 300, simulate="slow") for _ in range(2)]
        duplicate = next(as_completed(twins))  # whichever came second: the first takes three seconds
        (first,) = (twin for twin in twins if twin is not duplicate)
        assert duplicate.result().status_code == 409
        assert "in-flight" in duplicate.result().text
        assert "retry-after" in duplicate.result().headers
        assert demo.pay("slow-0001", 301, simulate="slow").status_code == 422
        assert not first.done(), "it was no longer in flight: the 422 proved nothing"
        assert first.result().status_code == 201
    assert demo.pay("slow-0001", 300, simulate="slow").content == first.result().content


def test_error_that_says_nothing_happened_runs_again(demo: Demo) -> None:
    """A 500 that says that nothing happened is not stored: the retry is attempt 2."""
    answers = [demo.pay("error-0001", simulate="error") for _ in range(2)]
    assert [(answer.status_code, answer.json()["attempt"]) for answer in answers] == [(500, 1), (500, 2)]


def test_decline_is_final(demo: Demo) -> None:
    """A 402 is an answer: stored, and replayed."""
    first, second = (demo.pay("decline-0001", simulate="decline") for _ in range(2))
    assert (first.status_code, second.status_code) == (402, 402)
    assert first.content == second.content
    assert second.headers["idempotency-replayed"] == "true"


def test_timeout_is_unknown(demo: Demo) -> None:
    """What may have happened is not tried again."""
    before = len(demo.payments())
    for _ in range(2):
        answer = demo.pay("timeout-0001", simulate="timeout")
        assert answer.status_code == 409
        assert "outcome-unknown" in answer.json()["type"]
    assert len(demo.payments()) == before


@pytest.mark.faults
def test_a_timeout_is_settled_by_the_ledger(demo: Demo) -> None:
    """Nothing was charged, and after the quarantine nothing will be: then, and not before, the retry may pay."""
    assert demo.pay("timeout-0002", 53, simulate="timeout").status_code == 409
    assert demo.charges(53) == []
    demo.retry_until(201, "succeeded", "timeout-0002", 53, "timeout")
    assert demo.audit("timeout-0002") == [("reconciler", "unknown", "failed_retryable")]
    assert len(demo.charges(53)) == 1


def test_large_response_leaves_a_tombstone(demo: Demo) -> None:
    """A 2 MiB answer is not kept; the retry learns that it is done, and where."""
    first, second = (demo.pay("large-0001", simulate="large") for _ in range(2))
    assert len(first.content) > 2 * 1024 * 1024
    assert (second.status_code, second.headers["location"]) == (201, first.headers["location"])
    assert "was not kept" in second.text


def test_a_bad_body_does_not_use_up_the_key(demo: Demo) -> None:
    """FastAPI's own 422, and then the same key for the corrected request."""
    bad = demo.pay("bad-0001", currency="euro")
    assert bad.status_code == 422
    assert bad.json()["detail"][0]["loc"] == ["body", "currency"]
    assert demo.pay("bad-0001").status_code == 201


def test_refunds_are_protected_too(demo: Demo) -> None:
    """The second route: one refund for two requests."""
    payment = demo.pay("refund-0001").json()
    headers = {"Authorization": "Bearer tenant-a", "Idempotency-Key": "refund-0002"}
    answers = [demo.http.post("/refunds", headers=headers, json={"paymentId": payment["id"]}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert demo.http.post("/refunds", headers={"Authorization": "Bearer tenant-a"}, json={}).status_code == 400


def test_one_key_on_two_endpoints_is_a_mismatch(demo: Demo) -> None:
    """A key is one operation of one tenant: the same one for a refund is another request."""
    payment = demo.pay("endpoints-0001").json()
    headers = {"Authorization": "Bearer tenant-a", "Idempotency-Key": "endpoints-0001"}
    assert demo.http.post("/refunds", headers=headers, json={"paymentId": payment["id"]}).status_code == 422


def test_a_client_that_leaves_changes_nothing(demo: Demo) -> None:
    """It hangs up while the payment runs: the payment is made and stored, and the retry gets its answer."""
    body = b'{"customerId": "cus-1", "amountCents": 4711, "currency": "EUR"}'
    head = (
        "POST /payments?simulate=slow HTTP/1.1\r\nHost: demo\r\nAuthorization: Bearer tenant-a\r\n"
        f"Idempotency-Key: leaves-0001\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", demo.port)) as impatient:
        impatient.sendall(head.encode() + body)
        demo.until(lambda: demo.status("leaves-0001").status_code != 404, "the payment did not begin")
    answer = demo.retry_until(201, "succeeded", "leaves-0001", 4711, "slow")
    assert answer.headers["idempotency-replayed"] == "true"
    assert [payment["amountCents"] for payment in demo.payments()].count(4711) == 1


def test_a_key_is_new_again_after_its_retention(demo: Demo) -> None:
    """When the time that Idempotency-Expires named is over, the same key is another payment."""
    first = demo.pay("expires-0001", 60)
    update = "UPDATE idempotency_keys SET expires_at = {} WHERE key = 'expires-0001'"
    if demo.store.startswith("mysql"):
        from tests.stores import mysql

        statement = update.replace("WHERE key", "WHERE `key`").format("UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
        mysql.run(demo.store, statement)
    elif demo.store.startswith("sqlite"):
        with closing(sqlite3.connect(demo.store.removeprefix("sqlite:///"), timeout=10)) as file:
            file.execute(update.format(1))
            file.commit()
    else:
        with psycopg.connect(demo.store) as database:
            database.execute(update.format("now() - interval '1 second'").encode())
    again = demo.pay("expires-0001", 61)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] != again.json()["id"]
    keys = {charge["downstreamKey"] for cents in (60, 61) for charge in demo.charges(cents)}
    assert len(keys) == 2, "the provider honours keys: under the old one it would have replayed the old charge"


def test_a_hung_store_is_503_and_nothing_is_charged(demo: Demo, request: pytest.FixtureRequest) -> None:
    """The database stops answering: refused in time, the handler is not called, and afterwards the key works."""
    if demo.store.startswith("sqlite"):
        pytest.skip("an embedded store has no server to stop; tests/web/test_store_faults.py locks the file")
    server = request.getfixturevalue("mysql_server" if demo.store.startswith("mysql") else "postgres_server")
    before = len(demo.payments())
    server.pause()
    try:
        refused = demo.pay("hung-0001", 8)
    finally:
        server.resume()
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert len(demo.payments()) == before
    deadline = time.monotonic() + 30
    while (answer := demo.pay("hung-0001", 8)).status_code != 201 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (answer.status_code, len(demo.payments())) == (201, before + 1)


def test_app_killed_after_the_charge_resumes_with_it(demo: Demo) -> None:
    """The app is killed after charging and before it knows: the retry resumes, and the charge is the first one."""
    with pytest.raises(httpx.TransportError):
        demo.pay("crash-0001", 777, simulate="crash")
    answer = demo.retry_until(201, "succeeded", "crash-0001", 777, "crash")
    for _ in range(5):
        again = demo.pay("crash-0001", 777, simulate="crash")
        assert (again.status_code, again.content) == (201, answer.content)
        assert again.headers["idempotency-replayed"] == "true"
    assert len(demo.charges(777)) == 1
    assert [payment for payment in demo.payments() if payment["amountCents"] == 777] == [answer.json()]


def test_ledger_of_the_provider_has_no_key_of_the_client(demo: Demo) -> None:
    """It shows what was charged and under which key; the client's key is not in it."""
    demo.pay("ledger-0001", 4242)
    (charge,) = demo.charges(4242)
    assert (charge["customerId"], charge["currency"]) == ("cus-1", "EUR")
    assert charge["downstreamKey"].startswith("oncekey-")
    assert "ledger-0001" not in str(charge)
    assert demo.http.put("/provider/charges").status_code == 405


def test_the_status_of_a_key(demo: Demo) -> None:
    """The answer again, without sending the request; for others there is no such key."""
    first = demo.pay("status-0001", 31)
    assert demo.status("status-0001").content == first.content
    assert demo.status("status-0001", "tenant-b").status_code == 404
    assert demo.status("status-0001", "tenant-c").status_code == 401


def test_the_provider_is_killed_too(demo: Demo) -> None:
    """Its ledger is on disk: the retry of an earlier payment, and a new one, find it as it was."""
    before = demo.pay("provider-0001", 51)
    demo.kill_one("provider")
    assert demo.pay("provider-0001", 51).content == before.content
    assert demo.retry_until(201, "succeeded", "provider-0002", 52).status_code == 201
    assert (len(demo.charges(51)), len(demo.charges(52))) == (1, 1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.faults)])
def test_restarts_lose_nothing(demo: Demo, times: int) -> None:
    """kill -9 of everything, several times in a row: every payment and every key is still there."""
    seen: dict[str, Any] = {}
    for turn in range(times):
        key = f"restart-{times}-{turn:04d}"
        seen[key] = demo.pay(key, 1000 + turn).content
        demo.kill()
        demo.start()
    before = demo.payments()
    for turn, (key, content) in enumerate(seen.items()):
        again = demo.pay(key, 1000 + turn)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.content == content
    assert demo.payments() == before
