"""What the README shows is what happens: its examples are run, and its curl lines are sent to the real demo."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.demo.process import Demo

ROOT = Path(__file__).parent.parent


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(source, "README.md", "exec"), names)
    return names


async def test_fastapi_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines protect the app: replayed, scoped, 401 without authentication."""
    monkeypatch.chdir(tmp_path)
    names = run(next(block for block in blocks("python") if "fastapi" in block))
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://readme") as client:
        headers = {"Authorization": "Bearer ann-secret", "Idempotency-Key": "readme-0001"}
        first, second = [await client.post("/payments", headers=headers, json={"amountCents": 5}) for _ in range(2)]
        assert first.json() == {"charged": 5, "attempt": 1}
        assert second.content == first.content
        assert second.headers["idempotency-replayed"] == "true"
        assert (await client.post("/payments", headers={"Idempotency-Key": "x"}, json={})).status_code == 401
        document = (await client.get("/openapi.json")).json()
        assert "Idempotency-Key" in str(document["paths"]["/payments"]["post"])
    await names["once"].aclose()


async def test_transactional_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One order, one job and one stored answer, in one file; the retry adds nothing."""
    monkeypatch.chdir(tmp_path)
    names = run(next(block for block in blocks("python") if "operation.enlist" in block))
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://readme") as client:
        headers = {"Idempotency-Key": "readme-0003"}
        first, second = [await client.post("/orders", headers=headers, json={"item": "tea"}) for _ in range(2)]
    assert (first.status_code, first.json()) == (201, {"id": 1})
    assert second.content == first.content
    with closing(sqlite3.connect("orders.db")) as look:
        assert look.execute("SELECT count(*) FROM orders").fetchone() == (1,)
        assert look.execute("SELECT task, payload FROM idempotency_outbox").fetchall() == [
            ("send_receipt", '{"order":1}')
        ]
    await names["once"].aclose()


async def test_route_by_route_example_protects_the_declared_route_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = blocks("python", "docs/coverage.md")
    names = run(next(block for block in page if 'only="declared"' in block and "amountCents" in block))
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://readme") as client:
        assert (await client.post("/payments", json={"amountCents": 5})).status_code == 400
        headers = {"Idempotency-Key": "readme-0004"}
        first, second = [await client.post("/payments", headers=headers, json={"amountCents": 5}) for _ in range(2)]
        assert (first.status_code, first.json()) == (201, {"charged": 5})
        assert second.headers["idempotency-replayed"] == "true"
        assert (await client.post("/search", json={})).json() == {"found": []}
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert "Idempotency-Key" in str(paths["/payments"]["post"])
    assert "Idempotency-Key" not in str(paths["/search"]["post"])
    await names["once"].aclose()


def test_flask_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flask, with an exempt route and one of its own policy."""
    monkeypatch.chdir(tmp_path)
    names = run(next(block for block in blocks("python") if "flask" in block))
    client = names["app"].test_client()
    headers = {"Idempotency-Key": "readme-0002"}
    first, second = (client.post("/orders", headers=headers, json={"item": "tea"}) for _ in range(2))
    assert (first.status_code, first.get_json()) == (201, {"ordered": "tea"})
    assert second.headers["idempotency-replayed"] == "true"
    assert client.post("/login").status_code == 404  # exempt: it reaches Flask, which has no such route
    names["once"].close()


DJANGO = """
SECRET_KEY, USE_TZ, ROOT_URLCONF, ALLOWED_HOSTS = "of tests", True, "shop.urls", ["*"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
"""
SHOP = """
from django.http import JsonResponse
from django.urls import path
urlpatterns = [path("orders", lambda request: JsonResponse({"user": str(request.user)}, status=201))]
"""
POSTS = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
headers = {"Idempotency-Key": "readme-0003"}
print(*(Client().post("/orders", "{}", "application/json", headers=headers).status_code for _ in range(2)))
"""


@pytest.mark.frameworks
def test_django_settings_of_the_readme_take_a_post(tmp_path: Path) -> None:
    """In a process of its own: Django has one settings object."""
    (tmp_path / "shop").mkdir()
    settings = next(block for block in blocks("python") if "INSTALLED_APPS" in block)
    files = {"__init__": "", "settings": settings + DJANGO, "urls": SHOP, "api": "def tenant_of(request): return 'ann'"}
    for name, text in files.items():
        (tmp_path / f"shop/{name}.py").write_text(text)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    done = subprocess.run(
        [sys.executable, "-c", POSTS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["201 201"], done.stderr


def curl_lines() -> list[tuple[str, str, dict[str, str], str | None]]:
    """(method, path, headers, body) of every curl command in the README."""
    found = []
    for block in blocks("console"):
        for command in re.findall(r"^\$ (curl .*?[^\\])$", block, re.MULTILINE | re.DOTALL):
            words = shlex.split(command.replace("\\\n", " "))[1:]
            url = next(word for word in words if word.startswith("http://"))
            headers = dict(value.split(": ", 1) for flag, value in pairwise(words) if flag == "-H")
            body = next((value for flag, value in pairwise(words) if flag == "-d"), None)
            found.append(("POST" if body else "GET", url.removeprefix("http://127.0.0.1:8080"), headers, body))
    return found


def test_the_curl_lines_of_the_first_minute(tmp_path: Path) -> None:
    """Pay, pay again, crash, look: in the order of the README, against ``oncekey demo``."""
    pay, crash, look = curl_lines()
    with Demo(f"sqlite:///{tmp_path / 'demo.db'}", tmp_path) as demo:

        def send(line: tuple[str, str, dict[str, str], str | None]) -> httpx.Response:
            method, path, headers, body = line
            return demo.http.request(method, path, headers=headers, content=body)

        first, second = send(pay), send(pay)
        assert (first.status_code, first.content) == (201, second.content)
        assert second.headers["idempotency-replayed"] == "true"
        with pytest.raises(httpx.TransportError):
            send(crash)
        demo.retry_until(201, "succeeded", "crash-1", 900, "crash")
        assert sorted(charge["amountCents"] for charge in send(look).json()) == [900, 1200]
