"""A Flask app with metrics that gunicorn serves in several processes. Nothing here asserts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from oncekey import OnceKey, Policy
from oncekey.telemetry.prometheus import Prometheus, metrics_wsgi_app
from oncekey.web.flask import protect


def make() -> Any:
    """POST /pay; with ``?wait`` it runs until the folder has a file named go. GET /pid: the process that answers."""
    folder = Path(os.environ["ONCEKEY_TEST_FOLDER"])
    app = Flask("served")

    def pay() -> Any:
        if (folder / "gate").exists():
            (folder / f"entered-{os.getpid()}").touch()
        while (folder / "gate").exists() and not (folder / "go").exists():
            time.sleep(0.005)
        return {"paid": True}, 201

    app.add_url_rule("/pay", "pay", pay, methods=["POST"])
    app.add_url_rule("/pid", "pid", lambda: str(os.getpid()))
    once = OnceKey(
        os.environ["ONCEKEY_TEST_STORE"],
        scope=lambda request: request.headers.get("x-tenant", "nobody"),
        routes={"POST /pay": Policy(effects="repeatable")},
        telemetry=Prometheus(tenants=2),
    )
    protect(app, once)
    # Before the fork: what the parent has counted must be counted once, not once per child.
    app.test_client().post("/pay", json={}, headers={"Idempotency-Key": "key-of-the-parent", "X-Tenant": "acme"})
    return DispatcherMiddleware(app, {"/metrics": metrics_wsgi_app()})
