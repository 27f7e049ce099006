"""A whole Django project, in a process of its own: commands, migrations, the admin, and a view under both servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from oncekey.stores.registry import open_store
from oncekey.testing.servers import free_port

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]  # each command takes a second, alone
ROOT = Path(__file__).parents[2]

SETTINGS = """
import json, os
from pathlib import Path
BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "of tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions", "django.contrib.messages",
    "django.contrib.admin", "oncekey.web.django", "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "oncekey.web.django.OnceKeyMiddleware",
]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {
    "context_processors": ["django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
                           "django.contrib.messages.context_processors.messages"]}}]
DATABASES = {"default": json.loads(os.environ["SHOP_DATABASE"])}
ONCEKEY = {"STORE": "default", "SCOPE": "SINGLE_TENANT", "POLICY": {"effects": "transactional"}}
"""
URLS = """
from django.contrib import admin
from django.db import models
from django.http import JsonResponse
from django.urls import path
from oncekey import current
from oncekey.web.django import once
from shop.models import Order

@once.policy(effects="transactional")
def order(request):
    current().enlist()
    made = Order.objects.create(name=current().key)
    return JsonResponse({"order": made.pk}, status=201)

urlpatterns = [path("orders", order), path("admin/", admin.site.urls)]
"""
MODELS = """
from django.db import models

class Order(models.Model):
    name = models.CharField(max_length=100)
"""
MIGRATION = """
from django.db import migrations, models
from oncekey.web.django.operations import MigrateOnceKey

class Migration(migrations.Migration):
    atomic = False
    operations = [
        migrations.CreateModel("Order", [("id", models.BigAutoField(primary_key=True, serialize=False)),
                                         ("name", models.CharField(max_length=100))]),
        MigrateOnceKey(),
    ]
"""
PROGRAM = """
import sys
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""


class Project:
    def __init__(self, folder: Path, database: dict[str, Any], url: str) -> None:
        self.folder, self.url = folder, url
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "SHOP_DATABASE": json.dumps(database),
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        self.environment.pop("ONCEKEY_STORE", None)
        (folder / "shop" / "migrations").mkdir(parents=True)
        files = {
            "manage.py": PROGRAM,
            "shop/__init__.py": "",
            "shop/settings.py": SETTINGS,
            "shop/urls.py": URLS,
            "shop/models.py": MODELS,
            "shop/migrations/__init__.py": "",
            "shop/migrations/0001_initial.py": MIGRATION,
        }
        for name, text in files.items():
            (folder / name).write_text(text)

    def run(self, *arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
        what = ["-c", program] if program else ["manage.py", *arguments]
        return subprocess.run(
            [sys.executable, *what], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def manage(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, program: str) -> Any:
        """Run a program with Django set up; what it prints last is JSON."""
        done = self.run(program="import django, json; django.setup()\n" + program)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def under_gunicorn(self, path: str) -> str:
        """What the server prints about one POST, which is answered 500."""
        port = free_port()
        command = [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "shop.wsgi"]
        server = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=30) as client:
                answer = client.post(f"http://127.0.0.1:{port}{path}", headers={"Idempotency-Key": "k-of-misuse"})
            assert answer.status_code == 500
        finally:
            server.terminate()
            printed, _ = server.communicate(timeout=30)
        return printed


@pytest.fixture(params=["sqlite", "postgresql"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    if request.param == "sqlite":
        name = tmp_path / "db.sqlite3"
        database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(name)}
        url = f"sqlite:///{name}"
    else:
        url = request.getfixturevalue("postgres_url")
        parts = urlsplit(url)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": unquote(parts.username or ""),
            "HOST": unquote(parts.hostname or "") or unquote(parts.query.partition("host=")[2].partition("&")[0]),
            "PORT": str(parts.port or "") or parts.query.partition("port=")[2].partition("&")[0],
        }
    return Project(tmp_path / "site", database, url)


ORDER = """
from django.test import Client
client = Client()
def order(key="k-first-order"):
    return client.post("/orders", data="{}", content_type="application/json", headers={"Idempotency-Key": key})
"""


def test_project_from_migrate_to_the_admin(project: Project) -> None:
    project.manage("check")
    said = project.manage("migrate")
    assert "shop.0001_initial... OK" in said
    assert "No migrations" not in said
    project.manage("migrate")  # again
    assert "up to date" in project.manage("oncekey", "migrate")

    answers = project.python(ORDER + "print(json.dumps([[r.status_code, r.json()] for r in (order(), order())]))")
    assert answers == [[201, {"order": 1}], [201, {"order": 1}]]

    listed = json.loads(project.manage("oncekey", "keys", "list", "--json"))
    assert "completed" in json.dumps(listed)
    routes = project.manage("oncekey", "routes")
    assert "/orders" in routes
    assert "/admin" not in routes
    project.manage("oncekey", "upkeep", "oncekey.web.django:once", "--once")
    helped = project.manage("oncekey", "--help")
    assert "dead-letters" in helped

    pages = project.python(
        """
from django.contrib.auth.models import User
from django.test import Client
client = Client()
client.force_login(User.objects.create_superuser("root", "r@example.org", "secret"))
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("UPDATE idempotency_keys SET last_error = 'no account of sk-7f3a9c21e0planted here'")
urls = ["/admin/", "/admin/oncekey/key/", "/admin/oncekey/key/?state=unknown", "/admin/oncekey/deadletter/"]
pages = [client.get(url) for url in urls]
import re
link = re.search(r'href="(/admin/oncekey/key/[^"?]+/change/)"', pages[1].content.decode())[1]
detail = client.get(link)
stranger = Client()
staff = Client()
staff.force_login(User.objects.create_user("staff", is_staff=True))
print(json.dumps({
    "status": [page.status_code for page in pages],
    "list": pages[1].content.decode(), "none": pages[2].content.decode(),
    "detail": [detail.status_code, detail.content.decode()], "link": link,
    "stranger": stranger.get(urls[1]).status_code, "staff": staff.get(urls[1]).status_code,
    "add": client.get("/admin/oncekey/key/add/").status_code,
    "login": stranger.post("/admin/login/", {"username": "root", "password": "secret"}).status_code,
    "gone": client.get("/admin/oncekey/key/~00000000 all/change/").status_code,
}))
"""
    )
    assert pages["status"] == [200, 200, 200, 200]
    assert "POST /orders" in pages["list"]
    assert "POST /orders" not in pages["none"]
    assert pages["detail"][0] == 200
    assert "Audit" in pages["detail"][1]
    assert "k-first-order" not in pages["list"] + pages["link"] + pages["detail"][1]
    assert pages["login"] == 302, "the admin's forms need no key"
    assert ("no account of … here" in pages["list"], "planted" in str(pages)) == (True, False)
    assert (pages["stranger"], pages["staff"], pages["add"], pages["gone"]) == (302, 403, 403, 404)


def test_command_of_a_wrong_setting_names_it(project: Project) -> None:
    settings = project.folder / "shop/settings.py"
    settings.write_text(settings.read_text().replace('"STORE": "default"', '"STORE": "defualt"'))
    for arguments in (("check",), ("oncekey", "keys", "list")):
        done = project.run(*arguments)
        assert done.returncode == 1
        assert "ONCEKEY['STORE'] is 'defualt'" in done.stderr
        assert "Traceback" not in done.stderr


def test_migration_of_another_database_creates_no_tables(project: Project) -> None:
    if project.url.startswith("sqlite"):
        settings = project.folder / "shop/settings.py"
        other = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(project.folder / "other.sqlite3")}
        settings.write_text(settings.read_text() + f"\nDATABASES['other'] = {other!r}\n")
        project.manage("migrate", "--database", "other")
        assert not Path(project.url.removeprefix("sqlite:///")).exists()
    project.manage("migrate")
    store = open_store(project.url)
    store.check()
    store.disconnect()
    store.close()


def test_strict_routes_fail_if_one_is_unprotected(project: Project) -> None:
    """``--strict`` without an app looks at the project, and its status is 1 if a retry of a route would run again."""
    assert "/orders" in project.manage("oncekey", "routes", "--strict")
    shop = project.folder / "shop/urls.py"
    shop.write_text(shop.read_text() + "urlpatterns.append(path('plain', lambda request: None))\n")
    settings = project.folder / "shop/settings.py"
    settings.write_text(settings.read_text().replace('"STORE": "default"', '"ONLY": "declared", "STORE": "default"'))
    done = project.run("oncekey", "routes", "--strict")
    assert done.returncode == 1
    assert "/plain" in done.stdout
    assert project.run("oncekey", "routes").returncode == 0


DECLARED = """
from django.http import HttpResponse
from django.urls import path
from oncekey.web.django import once
paid = []

@once.policy(effects="external")
def pay(request):
    paid.append(1)
    return HttpResponse(status=500)

urlpatterns = [path("pay", pay)]
"""
TWICE = """
from django.test import Client
client = Client()
for _ in range(2):
    client.post("/pay", headers={"Idempotency-Key": "k-first"})
from shop.urls import paid
print(len(paid))
"""


def test_declaration_holds_for_the_first_request_of_a_process(project: Project) -> None:
    """Django imports the views when it routes the first request, and that is after the middleware. By the POLICY of the
    settings, a 500 may run again."""
    (project.folder / "shop/urls.py").write_text(DECLARED)
    settings = project.folder / "shop/settings.py"
    text = settings.read_text().replace('"django.contrib.admin", ', "")
    settings.write_text(text.replace('"STORE": "default"', '"STORE": "memory://"'))
    assert project.python(TWICE) == 1


MISUSE = """
def misuse(request):
    current().enlist()
    current().enlist()
urlpatterns.append(path("misuse", misuse))
"""


def test_error_of_a_view_is_printed_under_gunicorn_without_debug(project: Project) -> None:
    """With Django's own LOGGING, which prints nothing there. So is an error of a declaration."""
    shop = project.folder / "shop/urls.py"
    shop.write_text(shop.read_text() + MISUSE)
    (project.folder / "shop/wsgi.py").write_text(
        "from django.core.wsgi import get_wsgi_application\napplication = get_wsgi_application()\n"
    )
    project.manage("migrate")
    assert "this operation has enlisted a transaction already" in project.under_gunicorn("/misuse")
    settings = project.folder / "shop/settings.py"
    settings.write_text(settings.read_text() + "ONCEKEY['ROUTES'] = {'POST /orders': {}}\n")
    assert "POST /orders has two declarations" in project.under_gunicorn("/orders")
