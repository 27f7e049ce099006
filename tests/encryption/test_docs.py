"""The app of docs/encryption.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.encryption.keyring import new_key

PAGE = (Path(__file__).parents[2] / "docs/encryption.md").read_text("utf-8")


async def test_app_of_the_page_keeps_no_card_number_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONCEKEY_KEYS", new_key(1))
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    made: dict[str, Any] = {"__name__": "example_of_the_docs"}
    exec(compile(source, "docs/encryption.md", "exec"), made)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made["app"]), base_url="http://docs") as client:
        first, again = [await client.post("/payments", headers={"Idempotency-Key": "order-1"}) for _ in range(2)]
    assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"order-1" in files
    assert b"4242" not in files
    await made["once"].aclose()


def test_page_says_that_encryption_is_an_extra() -> None:
    assert "pip install 'oncekey[encryption]'" in PAGE
