"""The apps of docs/clients.md, run as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

PAGE = (Path(__file__).parents[1] / "docs/clients.md").read_text("utf-8")


def example(word: str) -> dict[str, Any]:
    """What the example with this word defines."""
    source = next(one for one in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if word in one)
    names: dict[str, Any] = {"__name__": "example_of_the_docs"}
    exec(compile(source, "docs/clients.md", "exec"), names)
    return names


async def test_optional_key_protects_only_requests_that_carry_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = example("required=False")
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as client:

        async def ask(path: str = "/orders", **headers: str) -> httpx.Response:
            return await client.post(path, headers=headers, json={"item": "tea"})

        first, again = await ask(**{"Idempotency-Key": "k-1"}), await ask(**{"Idempotency-Key": "k-1"})
        assert (first.status_code, again.headers["idempotency-replayed"]) == (201, "true")
        bare = [await ask() for _ in range(2)]
        assert [one.status_code for one in bare] == [201, 201]
        assert all("idempotency-replayed" not in one.headers for one in bare)
        assert (await ask(**{"Idempotency-Key": ""})).status_code == 400
        assert (await ask("/others")).status_code == 400
    await names["once"].aclose()


async def test_duplicate_waits_for_the_first_under_the_stripe_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = example('profile="stripe"')
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as client:
        headers = {"Idempotency-Key": "k-1"}
        answers = await asyncio.gather(
            *(client.post("/charges", headers=headers, json={"amount": 5}) for _ in range(5))
        )
        assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"charged":5}')}
        mismatch = await client.post("/charges", headers=headers, json={"amount": 6})
        assert mismatch.headers["stripe-should-retry"] == "false"
    await names["once"].aclose()
