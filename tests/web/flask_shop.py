"""A Flask app behind our protection, and the views that the tests put into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask
from werkzeug.test import TestResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Record
from oncekey.telemetry import events
from oncekey.testing.http.flaky import ONE, FlakyStore
from oncekey.testing.http.payments import MAX_RESPONSE
from oncekey.web.flask import protect

KEY = {"Idempotency-Key": "k-1"}


class Shop:
    """A Flask app with one protected view that the test gives; ``calls`` is what happened, in order."""

    def __init__(self, view: Callable[..., Any] | None = None, *, testing: bool = False, **policy: Any) -> None:
        self.calls: list[str] = []
        self.store = FlakyStore()
        self.events: list[events.Event] = []
        policy.setdefault("max_response_bytes", MAX_RESPONSE)
        self.once = OnceKey(self.store, scope=SINGLE_TENANT, policy=Policy(**policy), on_event=self.events.append)
        self.app = Flask("shop")
        self.app.secret_key = "for the tests"
        self.app.testing = testing
        protect(self.app, self.once)
        if view is not None:
            self.app.add_url_rule("/payments", "pay", self.counted(view), methods=["POST"])

    def counted(self, view: Callable[..., Any]) -> Callable[..., Any]:
        def counting(**arguments: Any) -> Any:
            self.calls.append("view")
            return view(**arguments)

        return counting

    @property
    def runs(self) -> int:
        return self.calls.count("view")

    def post(self, path: str = "/payments", key: str | None = "k-1", **more: Any) -> TestResponse:
        """One request, by a client that remembers no cookies."""
        headers = {} if key is None else {"Idempotency-Key": key}
        client = self.app.test_client(use_cookies=False)
        return client.post(path, headers=headers, json={"amount": 1000}, buffered=True, **more)

    def record(self, key: str = "k-1") -> Record | None:
        return self.store.read([(ONE, key)])[0]

    @property
    def state(self) -> str | None:
        record = self.record()
        return record.state.value if record else None


MakeShop = Callable[..., Shop]


def pay() -> Any:
    return {"id": "pay_1"}, 201, {"Location": "/payments/pay_1"}


def broken() -> Any:
    raise RuntimeError("after the charge")


def replayed(answer: TestResponse) -> bool:
    return answer.headers.get("Idempotency-Replayed") == "true"


class OutOfStock(Exception):
    pass
