"""Python is set for servers when a server has started, and only where the app has not done so itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, gc, sys
from oncekey import SINGLE_TENANT, OnceKey
from oncekey.web.asgi import IdempotencyMiddleware

async def app(scope, receive, send):
    await receive()
    await send({{"type": "lifespan.startup.complete"}})
    await receive()
    await send({{"type": "lifespan.shutdown.complete"}})

{before}
async def main():
    middleware = IdempotencyMiddleware(app, once=OnceKey("memory://", scope=SINGLE_TENANT), **{options})
    said = [{{"type": "lifespan.startup"}}, {{"type": "lifespan.shutdown"}}]
    async def receive():
        return said.pop(0)
    async def send(message):
        if message["type"] == "lifespan.startup.complete":
            print(gc.isenabled(), *gc.get_threshold(), gc.get_freeze_count() > 1000, round(sys.getswitchinterval(), 6))
    await middleware({{"type": "lifespan"}}, receive, send)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("before", "options", "printed"),
    [
        ("", {}, "True 10000 20 20 True 0.0002"),
        ("", {"tune": False}, "True 700 10 10 False 0.005"),
        ("gc.set_threshold(5000, 5, 5)", {}, "True 5000 5 5 False 0.0002"),
        ("gc.disable()", {}, "False 700 10 10 False 0.0002"),
        ("sys.setswitchinterval(0.001)", {}, "True 10000 20 20 True 0.001"),
    ],
)
def test_python_settings_change_at_the_start(before: str, options: dict[str, bool], printed: str) -> None:
    """In a process of its own, since the setting is the process's."""
    program = PROGRAM.format(before=before, options=options)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.strip() == printed, ended.stderr
