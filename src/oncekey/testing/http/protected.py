"""The protected payments API of one framework, in the process that serves it.

``Framework`` says how to make the app. ``Protected`` is such an app with its OnceKey, and all that a test may ask of
both: what handlers did, which events and log lines there were. A test may be in another process (``served.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.routes import plain
from oncekey.telemetry.events import Event
from oncekey.testing.http.flaky import ONE
from oncekey.testing.http.payments import MAX_RESPONSE, Payments
from oncekey.web.route_audit import Coverage, audit


@dataclass(frozen=True)
class Framework:
    """How to make the payments API in one framework, protected."""

    make_app: Callable[[Payments, OnceKey], Any]
    is_async: bool = True
    """Whether it makes an ASGI app; otherwise a WSGI app."""
    async_handlers: bool = True
    """Whether its handlers run in the event loop; otherwise in threads. A WSGI app has none that do."""
    reports_endpoints: bool = True
    """Whether oncekey sees its endpoints being entered and what they raise. Without it a 4xx is the app's own word."""
    name: str = ""
    make_declaring_app: Callable[[Payments, OnceKey], Any] | None = None
    """Makes an app whose handlers declare what protects them, and which adds one after ``protect()``."""

    def __post_init__(self) -> None:
        if not self.is_async:
            object.__setattr__(self, "async_handlers", False)


class Protected(logging.Handler):
    """An app, its OnceKey, and what both did. As a handler of logs it collects the warnings of oncekey."""

    def __init__(
        self,
        framework: Framework,
        store: Any,
        *,
        declaring: bool = False,
        policy: Policy | None = None,
        effects: Any = "external",
        **options: Any,
    ) -> None:
        super().__init__(logging.WARNING)
        self.payments = Payments()
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.store = store
        options.setdefault("scope", SINGLE_TENANT)
        self.once = OnceKey(
            store,
            policy=policy or Policy(effects=effects, max_response_bytes=MAX_RESPONSE),
            on_event=self.events.append,
            **options,
        )
        logging.getLogger("oncekey").addHandler(self)
        make_app = framework.make_declaring_app if declaring else framework.make_app
        assert make_app is not None, "a framework without make_declaring_app"
        self.app = make_app(self.payments, self.once)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def is_waiting(self, key: str) -> bool:
        """Whether a duplicate of this key waits for the first request."""
        return bool(self.once.engine.waiters.get((ONE, key)))

    def wake_keeper(self) -> None:
        """Let the keeper look for unfinished outcomes now; otherwise it looks once a second."""
        self.once.engine.keeper._wake.set()

    def coverage(self) -> dict[tuple[str, str], Coverage]:
        """What ``oncekey routes`` says: the method and path of each endpoint, and whether it is protected."""
        return {(each.method, plain(each.path)): each.coverage for each in audit(self.app).endpoints}

    def close_blocking(self) -> None:
        logging.getLogger("oncekey").removeHandler(self)
        self.once.close()

    async def close_in_loop(self) -> None:
        logging.getLogger("oncekey").removeHandler(self)
        await self.once.aclose(grace=2.0)
