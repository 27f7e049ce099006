"""What oncekey needs of the process (asyncio), and what it changes in it: docs/servers.md.

The settings are the process's, so each app runs in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar
from litestar.config.app import AppConfig
from starlette.applications import Starlette

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.errors import ConfigurationError
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.litestar import OnceKeyPlugin
from oncekey.web.starlette import protect

pytestmark = pytest.mark.frameworks
PAGE = (Path(__file__).parents[1] / "docs/servers.md").read_text("utf-8")

PROGRAM = """
import asyncio, gc, sys
from oncekey import SINGLE_TENANT, OnceKey

def look():
    return gc.get_threshold(), gc.get_freeze_count() > 1000, round(sys.getswitchinterval(), 6)

async def serve(app, inside):
    done, up = asyncio.Event(), asyncio.Event()
    async def receive():
        if not up.is_set():
            return {{"type": "lifespan.startup"}}
        await done.wait()
        return {{"type": "lifespan.shutdown"}}
    async def send(message):
        assert message["type"] in ("lifespan.startup.complete", "lifespan.shutdown.complete"), message
        up.set()
    scope = {{"type": "lifespan", "asgi": {{"version": "3.0"}}, "state": {{}}}}
    serving = asyncio.create_task(app(scope, receive, send))
    await up.wait()
    await inside()
    done.set()
    await serving

once = OnceKey("memory://", scope=SINGLE_TENANT)
{make}

async def main():
    async def inside():
        print(*look())
    await serve(app, inside)
    print(*look())

asyncio.run({run})
"""
FASTAPI = """
from fastapi import FastAPI
from oncekey.web.fastapi import protect
app = FastAPI()
protect(app, once{options})
"""
STARLETTE = """
from starlette.applications import Starlette
from oncekey.web.starlette import protect
app = Starlette()
protect(app, once{options})
"""
LITESTAR = """
from litestar import Litestar
from litestar.config.app import AppConfig
from oncekey.web.litestar import OnceKeyPlugin
app = Litestar(plugins=[OnceKeyPlugin(once{options})])
"""
PYTHONS, SERVERS = "(700, 10, 10) False 0.005", "(10000, 20, 20) True 0.0002"


def printed(make: str, run: str = "main()") -> list[str]:
    program = PROGRAM.format(make=make, run=run)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize("make", [FASTAPI, STARLETTE, LITESTAR], ids=["fastapi", "starlette", "litestar"])
def test_settings_are_changed_while_the_app_is_up_and_restored_after(make: str) -> None:
    assert printed(make.format(options="")) == [SERVERS, PYTHONS]


@pytest.mark.parametrize("make", [FASTAPI, STARLETTE, LITESTAR], ids=["fastapi", "starlette", "litestar"])
def test_tune_false_leaves_the_settings_alone(make: str) -> None:
    assert printed(make.format(options=", tune=False")) == [PYTHONS, PYTHONS]


def test_settings_are_restored_when_the_last_of_two_apps_ends() -> None:
    second = "\nouter = app\n" + STARLETTE.format(options="")
    nested = """
async def twice():
    async def inside():
        async def innermost():
            print(*look())
        await serve(app, innermost)
        print(*look())
    await serve(outer, inside)
    print(*look())
"""
    assert printed(FASTAPI.format(options="") + second + nested, "twice()") == [SERVERS, SERVERS, PYTHONS]


def test_settings_that_the_app_changed_meanwhile_stay() -> None:
    change = """
async def change():
    async def inside():
        gc.set_threshold(5, 6, 7)
        sys.setswitchinterval(0.003)
    await serve(app, inside)
    print(*look())
"""
    assert printed(STARLETTE.format(options="") + change, "change()") == ["(5, 6, 7) True 0.003"]


def test_the_example_of_the_page_leaves_the_settings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert printed(example) == [PYTHONS, PYTHONS]


# -- asyncio only --------------------------------------------------------------------------------------------------


def outside_asyncio(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it as trio does: without an event loop of asyncio."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration:
        pass


def test_app_without_asyncio_fails_to_start_with_one_clear_error(caplog: pytest.LogCaptureFixture) -> None:
    app = Starlette()
    protect(app, OnceKey("memory://", scope=SINGLE_TENANT))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ConfigurationError):
        outside_asyncio(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send))
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert "oncekey runs on asyncio" in message["message"]
    assert caplog.messages == [message["message"]]
    assert message["message"] in " ".join(PAGE.split())


def test_request_without_asyncio_and_lifespan_raises_the_same_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("never called")

    middleware = IdempotencyMiddleware(app, once=OnceKey("memory://", scope=SINGLE_TENANT))
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(ConfigurationError, match="oncekey runs on asyncio"):
        outside_asyncio(middleware(scope, None, None))  # type: ignore[arg-type]


def test_litestar_without_asyncio_fails_to_start() -> None:
    plugin = OnceKeyPlugin(OnceKey("memory://", scope=SINGLE_TENANT))
    (lifespan,) = plugin.on_app_init(AppConfig()).lifespan
    assert callable(lifespan)

    async def start() -> None:
        async with lifespan(Litestar()):
            raise AssertionError("never up")

    with pytest.raises(ConfigurationError, match="oncekey runs on asyncio"):
        outside_asyncio(start())
