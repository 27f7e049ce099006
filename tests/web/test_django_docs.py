"""The project of docs/django.md, made of the files as they stand there, and of examples/django_shop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncekey.web.django.conf import _OF_MIDDLEWARE, _OPTIONS

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/django.md").read_text("utf-8")
FILES = dict(re.findall(r"^```python\n# (shop/\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))

REST = """
from pathlib import Path
SECRET_KEY = "of tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS += ["rest_framework"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).parent / "db.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
OTHERS = {
    "shop/__init__.py": "",
    "shop/migrations/__init__.py": "",
    "shop/models.py": """
from django.contrib.auth.models import User
from django.db import models
class Order(models.Model):
    customer = models.ForeignKey(User, models.CASCADE)
""",
    "shop/migrations/0001_initial.py": """
from django.conf import settings
from django.db import migrations, models
class Migration(migrations.Migration):
    dependencies = [migrations.swappable_dependency(settings.AUTH_USER_MODEL)]
    operations = [migrations.CreateModel("Order", [
        ("id", models.BigAutoField(primary_key=True, serialize=False)),
        ("customer", models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE)),
    ])]
""",
}
PROGRAM = """
import json, django
django.setup()
from django.core.management import call_command
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
from django.contrib.auth.models import User
from django.test import Client
from shop.models import Order
client = Client()
def post(path, key="k-1", body="{}"):
    answer = client.post(path, data=body, content_type="application/json", headers={"Idempotency-Key": key})
    return answer.status_code
said = {"stranger": post("/orders")}
client.force_login(User.objects.create_user("ann"))
said["orders"] = [post("/orders"), post("/orders")]
said["count"] = Order.objects.count()
said["get"] = client.get("/orders").status_code
said["status"] = [client.get("/idempotency/" + key).status_code for key in ("k-1", "k-9")]
said["payments"] = [post("/payments", "k-2", '{"cents": 0}'), post("/payments", "k-2", '{"cents": 5}')]
from shop.tasks import cancel
said["cancelled"] = [cancel(1), cancel(1), Order.objects.count()]
print(json.dumps(said))
"""


def run(program: list[str], folder: Path, **more: str) -> str:
    paths = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": paths, **more}
    done = subprocess.run(
        [sys.executable, *program], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_project_of_the_page_runs_as_it_says(tmp_path: Path) -> None:
    for name, text in {**OTHERS, **FILES, "shop/settings.py": FILES["shop/settings.py"] + REST}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = run(["-c", PROGRAM], tmp_path, DJANGO_SETTINGS_MODULE="shop.settings").splitlines()
    said = json.loads(lines[-1])
    assert said == {
        "stranger": 401,
        "orders": [201, 201],
        "count": 1,
        "get": 405,
        "status": [201, 404],
        "payments": [400, 201],
        "cancelled": [1, 1, 0],
    }
    assert lines.count("order 1") == 1, "the hook ran once"


def test_page_lists_every_setting() -> None:
    listed = re.findall(r"^\| (.*?) \|", PAGE.partition("## Settings")[2], re.MULTILINE)
    assert set(re.findall(r"`([A-Z_]+)`", " ".join(listed))) == {*_OPTIONS, *_OF_MIDDLEWARE}


SHOP = """
import json, django
django.setup()
from django.core.management import call_command
call_command("check", fail_level="WARNING")
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
call_command("migrate", verbosity=0)
from examples.django_shop.models import Order
from examples.django_shop.{server} import application
import asyncio, httpx
asked = {{"url": "/orders", "json": {{"item": "book"}}}}
ann = {{"Authorization": "Bearer ann-secret", "Idempotency-Key": "order-1"}}
async def ask():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://shop") as client:
        return [await client.post(**asked, headers=each) for each in (ann, ann, {{}})]
def ask_now():
    with httpx.Client(transport=httpx.WSGITransport(application), base_url="http://shop") as client:
        return [client.post(**asked, headers=each) for each in (ann, ann, {{}})]
answers = asyncio.run(ask()) if "{server}" == "asgi" else ask_now()
from oncekey.web.django import once
kept = once.get().store.read([("ann", "order-1")])[0].effects.value
said = [[answer.status_code for answer in answers], answers[0].json(), Order.objects.count()]
print(json.dumps([*said, kept, once.get().default_policy.effects]))
"""


@pytest.mark.parametrize("server", ["wsgi", "asgi"])
def test_example_shop_takes_one_order_for_two_requests(tmp_path: Path, server: str) -> None:
    environ: dict[str, Any] = {
        "DJANGO_SETTINGS_MODULE": "examples.django_shop.settings",
        "SHOP_DATABASE": str(tmp_path / "shop.sqlite3"),
    }
    said = json.loads(run(["-c", SHOP.format(server=server)], tmp_path, **environ).splitlines()[-1])
    assert said == [[201, 201, 401], {"order": 1, "item": "book"}, 1, "transactional", "external"]
