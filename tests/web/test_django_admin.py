"""What Django's admin shows of the store: keys page by page, dead letters, and the audit. It changes nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey.core.audit import AuditLine
from oncekey.core.states import State
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import KeyTable, Run, runner
from tests.web.django_apps import configure, urls

configure()

from django.contrib import admin  # noqa: E402 - Django is configured first
from django.contrib.admin.utils import quote, unquote  # noqa: E402
from django.http import Http404  # noqa: E402
from django.test import RequestFactory, override_settings  # noqa: E402
from django.urls import path, resolve  # noqa: E402

from oncekey.web.django import admin as pages  # noqa: E402
from oncekey.web.django import conf  # noqa: E402
from oncekey.web.django.models import DeadLetter, Key  # noqa: E402

KEY, SCOPE = "order-1-of-today", "acme"
ROOT = SimpleNamespace(
    is_active=True,
    is_staff=True,
    is_authenticated=True,
    is_anonymous=False,
    pk=1,
    has_perm=lambda name: True,
    has_module_perms=lambda app: True,
    has_usable_password=lambda: True,
    get_username=lambda: "root",
    get_short_name=lambda: "root",
)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[KeyTable]:
    made = KeyTable(f"sqlite:///{tmp_path / 'keys.db'}")
    yield made
    made.close()


@pytest.fixture
def operate(table: KeyTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(table.url, monkeypatch, capsys)


@pytest.fixture
def show(table: KeyTable) -> Iterator[Callable[[str], str]]:
    """The page at an address of the admin, as its user reads it."""
    conf.once.reset()
    said = {"STORE": table.url, "SCOPE": "SINGLE_TENANT"}
    with override_settings(ONCEKEY=said, ROOT_URLCONF=urls(path("admin/", admin.site.urls))):

        def show(address: str) -> str:
            request: Any = RequestFactory().get(address)
            request.user = ROOT
            found = resolve(request.path)
            kind = pages.KeyAdmin if "/key/" in address else pages.DeadLetterAdmin
            model: Any = Key if kind is pages.KeyAdmin else DeadLetter
            view = kind(model, admin.site)
            if "object_id" in found.kwargs:
                answer: Any = view.change_view(request, found.kwargs["object_id"])
            else:
                answer = view.changelist_view(request)
            return html.unescape(answer.render().content.decode())

        yield show
    conf.once.reset()


def test_dead_letters_show_jobs_and_keys_that_were_given_up(table: KeyTable, show: Callable[[str], str]) -> None:
    job = table.dead_job()
    table.add("send_invoice")
    table.dead_key(KEY)
    table.put("order-2-of-today", State.UNKNOWN)
    page = show("/admin/oncekey/deadletter/")
    for words in (job, "send_receipt", "SMTPError: 550 no such user", redact(KEY), "the provider does not know it"):
        assert words in page
    for words in ("send_invoice", redact("order-2-of-today"), KEY, "ada@example.com"):
        assert words not in page


def test_page_of_a_key_shows_its_audit_and_its_jobs(table: KeyTable, operate: Run, show: Callable[[str], str]) -> None:
    record = table.put(KEY, State.UNKNOWN, scope="single-tenant")
    job = table.add("send_receipt", of=record)
    settled = ("--fail", "--status", "402", "--body", "{}", "--yes", "--who", "ann", "--why", "the bank says no")
    code, _, error = operate("keys", "resolve", KEY, *settled)
    assert code == 0, error
    (link,) = re.findall(r'href="(/admin/oncekey/key/[^"?]+/change/)"', show("/admin/oncekey/key/"))
    assert KEY not in unquote(link)
    page = show(link)
    for words in ("ann", "the bank says no", "unknown", "failed", job, "send_receipt", "402, 2 bytes"):
        assert words in page
    assert KEY not in page


def test_page_of_a_forgotten_key_shows_its_audit(table: KeyTable, operate: Run, show: Callable[[str], str]) -> None:
    """The audit outlives the key."""
    table.put(KEY, State.COMPLETED, scope="single-tenant")
    code, _, error = operate("keys", "forget", KEY, "--yes", "--who", "ann", "--why", "paid by hand")
    assert code == 0, error
    address = f"/admin/oncekey/key/{quote(f'{KEY} single-tenant')}/change/"
    page = show(address)
    for words in ("the key is gone", "ann", "paid by hand", "deleted", redact(KEY)):
        assert words in page
    with pytest.raises(Http404):
        show(address.replace("single", "other"))


def test_audit_of_the_whole_store_is_on_the_page_of_keys(
    show: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Audit of the whole store" not in show("/admin/oncekey/key/")
    line = AuditLine(1.0, "ann", "re-encrypt", "", "oncekey:re-encrypt", None, "", "", "the old key leaked")

    def audit(self: Any, scope: str, key: str, limit: int) -> list[AuditLine]:
        return [line] if (scope, key) == ("", "oncekey:re-encrypt") else []

    monkeypatch.setattr(type(conf.once.get().store), "audit", audit)
    assert "the old key leaked" in show("/admin/oncekey/key/")


def test_list_of_keys_has_filters_and_pages(
    table: KeyTable, show: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE", 2)
    names = [f"order-{number}-of-today" for number in range(5)]
    for name in names:
        table.put(name, State.COMPLETED)
    table.put("order-9-of-today", State.UNKNOWN, scope="other")
    seen, address = "", "/admin/oncekey/key/?scope=acme&state=completed"
    for number in range(3):
        page = show(address)
        seen += page
        more = re.findall(r'href="\?([^"]+)">next page', page)
        assert len(more) == (number < 2)
        address = f"/admin/oncekey/key/?{more[0]}" if more else ""
    assert [seen.count(f">{redact(name)}<") for name in names] == [1] * 5
    assert redact("order-9-of-today") not in seen
    assert redact("order-9-of-today") in show("/admin/oncekey/key/?state=unknown")


def test_store_that_does_not_answer_is_a_sentence_on_the_page(
    table: KeyTable, show: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from oncekey.errors import StoreUnavailable

    def away(*args: Any, **options: Any) -> Any:
        raise StoreUnavailable("the database does not answer")

    monkeypatch.setattr(type(conf.once.get().store), "listing", away)
    for address in ("/admin/oncekey/key/", "/admin/oncekey/deadletter/"):
        assert "the database does not answer" in show(address)


def test_pages_change_nothing(show: Callable[[str], str]) -> None:
    request: Any = RequestFactory().get("/admin/")
    request.user = ROOT
    for kind, model in ((pages.KeyAdmin, Key), (pages.DeadLetterAdmin, DeadLetter)):
        view: Any = kind(model, admin.site)
        for allowed in (view.has_add_permission, view.has_change_permission, view.has_delete_permission):
            assert not allowed(request)
    with pytest.raises(Http404):
        show("/admin/oncekey/deadletter/1/change/")
