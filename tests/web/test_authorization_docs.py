"""The apps of docs/authorization.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

PAGE = (Path(__file__).parents[2] / "docs/authorization.md").read_text("utf-8")


@pytest.fixture
def names(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the example of a framework defines."""
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    source = next(example for example in examples if f"oncekey.web.{request.param}" in example)
    made: dict[str, Any] = {"__name__": "example_of_the_docs"}
    exec(compile(source, "docs/authorization.md", "exec"), made)
    return made


@pytest.mark.parametrize("names", ["fastapi"], indirect=True)
async def test_fastapi_example_keeps_the_replay_from_the_intern(names: dict[str, Any]) -> None:
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as client:

        async def ask(token: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "k-1"}
            return await client.post("/api-keys", headers=headers)

        first, again, intern, stranger = [await ask(token) for token in ("ann-secret", "ann-secret", "ivy-secret", "x")]
    assert (first.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert (intern.status_code, stranger.status_code) == (403, 401)
    assert "Only administrators make API keys." in intern.text
    await names["once"].aclose()


@pytest.mark.parametrize("names", ["flask"], indirect=True)
def test_flask_example_keeps_the_replay_from_the_intern(names: dict[str, Any]) -> None:
    client = names["app"].test_client()

    def ask(token: str) -> Any:
        return client.post("/api-keys", headers={"X-Token": token, "Idempotency-Key": "k-1"})

    first, again, intern, stranger = (ask(token) for token in ("ann-secret", "ann-secret", "ivy-secret", "x"))
    assert (first.status_code, again.data) == (201, first.data)
    assert again.headers["idempotency-replayed"] == "true"
    assert (intern.status_code, stranger.status_code) == (403, 401)
    names["once"].close()
