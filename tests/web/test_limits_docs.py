"""The apps of docs/limits.md, run as they stand there."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.core.personal_data import Personal, personal_data

PAGE = (Path(__file__).parents[2] / "docs/limits.md").read_text("utf-8")


@pytest.fixture
def names(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the example with this word defines."""
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (source,) = [example for example in examples if request.param in example]
    made: dict[str, Any] = {"__name__": "example_of_the_docs"}
    exec(compile(source, "docs/limits.md", "exec"), made)
    return made


def client_of(names: dict[str, Any]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(names["app"]), base_url="http://docs")


@pytest.mark.parametrize("names", ["max_age="], indirect=True)
async def test_old_request_of_the_example_is_refused(names: dict[str, Any]) -> None:
    async with client_of(names) as client:

        async def ask(key: str, age: float) -> httpx.Response:
            headers = {"Idempotency-Key": key, "Idempotency-Timestamp": str(time.time() - age)}
            return await client.post("/orders", headers=headers, json={"item": "tea"})

        answers = [await ask("k-1", 3600), await ask("k-1", 60), await ask("k-1", 3600), await ask("k-2", 3600)]
    assert [answer.status_code for answer in answers] == [400, 201, 201, 400]
    await names["once"].aclose()


@pytest.mark.parametrize("names", ["bind="], indirect=True)
async def test_key_of_the_example_is_of_one_user(names: dict[str, Any]) -> None:
    async with client_of(names) as client:
        answers = [
            await client.post("/api-keys", headers={"Idempotency-Key": "k-1", "X-Token": token})
            for token in ("token-1", "token-2", "token-1", "token-3")
        ]
    assert [answer.status_code for answer in answers] == [201, 422, 201, 401]
    await names["once"].aclose()


@pytest.mark.parametrize("names", ["max_active_keys="], indirect=True)
async def test_limits_of_the_example_bound_one_tenant(names: dict[str, Any]) -> None:
    async with client_of(names) as client:

        async def ask(key: str, token: str = "ann-secret") -> int:
            headers = {"Idempotency-Key": key, "X-Token": token}
            return (await client.post("/orders", headers=headers, json={"item": "tea"})).status_code

        async def look(key: str, token: str = "ann-secret") -> int:
            return (await client.get(f"/idempotency/{key}", headers={"X-Token": token})).status_code

        taken = [await ask(f"k-{number}") for number in range(102)]
        assert taken == [201] * 100 + [429] * 2
        assert (await ask("k-1"), await ask("k-1", "bob-secret")) == (201, 201)
        assert [await look(f"g-{number}") for number in range(61)] == [404] * 60 + [429]
        assert (await look("k-1"), await look("k-1", "bob-secret")) == (429, 201)
    await names["once"].aclose()


@pytest.mark.parametrize("names", ["pii="], indirect=True)
async def test_personal_key_of_the_example_is_refused(names: dict[str, Any]) -> None:
    async with client_of(names) as client:
        answers = [
            await client.post("/orders", headers={"Idempotency-Key": key}, json={"item": "tea"})
            for key in ("ann@example.com", "4111-1111-1111-1111", "550e8400-e29b-41d4-a716-446655440000")
        ]
    assert [answer.status_code for answer in answers] == [400, 400, 201]
    assert answers[0].json()["type"].endswith("key-personal")
    await names["once"].aclose()


def forms_of_the_page() -> list[tuple[str, str]]:
    """Every example in the table of what looks like personal data, with its kind."""
    table = PAGE.split("| kind |")[1].split("\n\n")[0]
    found, kind = [], ""
    for row in table.splitlines()[2:]:
        _, first, examples, *_ = re.split(r"(?<!\\)\|", row)
        kind = first.strip(" `") or kind
        found += [(kind, word) for word in re.findall(r"`([^`]+)`", examples) if word != "alg"]
    return found


def test_forms_of_the_page_are_recognised() -> None:
    forms = forms_of_the_page()
    assert [(str(personal_data(form)), form) for _, form in forms] == forms
    assert [len([kind for kind, _ in forms if kind == each]) for each in Personal] == [2, 1, 4, 9]
