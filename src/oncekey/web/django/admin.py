"""Keys, dead letters and the audit in Django's admin: to look at, not to change.

It reads the store of the setting ``ONCEKEY``, of whatever kind, and shows keys masked, as the log and the command line
do. To settle a key, use ``manage.py oncekey keys resolve``, which writes the audit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from oncekey.core.audit import AuditLine
from oncekey.core.record import Record
from oncekey.core.sealed import shown
from oncekey.core.states import State
from oncekey.errors import OnceKeyError
from oncekey.stores.api import Outbox, Store
from oncekey.stores.kept_api import OPERATORS_LINE
from oncekey.telemetry.redaction import mask, redact
from oncekey.web.django import conf
from oncekey.web.django.models import DeadLetter, Key

PAGE = 100
_GONE = {"name": "", "columns": (), "rows": [{"cells": ["state", "the key is gone: it has expired, or was deleted"]}]}
_COLUMNS = ("key", "scope", "operation", "state", "attempt", "created", "expires", "last error")


class _ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """An entry of the admin that shows pages of its own."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def page(self, request: HttpRequest, title: str, tables: list[dict[str, Any]], **more: Any) -> HttpResponse:
        context = {**self.admin_site.each_context(request), "title": title, "tables": tables, "opts": self.opts, **more}
        return TemplateResponse(request, "admin/oncekey/tables.html", context)

    @contextmanager
    def store(self, request: HttpRequest) -> Iterator[Store]:
        """The store, for a user that may look."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        store = conf.once.get().store
        try:
            yield store
        finally:
            store.disconnect()


@admin.register(Key)
class KeyAdmin(_ReadOnly):
    """Lists keys page by page, by state and scope."""

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        asked = request.GET
        state = State(asked["state"]) if asked.get("state") in set(State) else None
        with self.store(request) as store:
            try:
                after = _whole(store, asked["after"]) if asked.get("after") else None
                found = store.listing(state, asked.get("scope") or None, limit=PAGE + 1, after=after)
                of_store = store.audit(*OPERATORS_LINE, PAGE)
            except OnceKeyError as error:
                return self.page(request, "Keys", [], problem=str(error))
        query = asked.copy()
        if len(found) > PAGE:
            query["after"] = _name(found[PAGE - 1])
        tables = [{"name": "", "columns": _COLUMNS, "rows": [_row(record) for record in found[:PAGE]]}]
        if of_store:
            tables.append(_audit("Audit of the whole store", of_store))
        more = query.urlencode() if len(found) > PAGE else ""
        return self.page(request, "Keys", tables, states=list(State), chosen=asked, more=more, filters=True)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """One key, with its audit and its jobs. They outlive it: a key that is gone is found by its whole name."""
        look = import_module("oncekey.admin.key_view").look
        with self.store(request) as store:
            scope, key = _whole(store, unquote(object_id))
            try:
                found = look(store, scope, key)
            except OnceKeyError as error:
                raise Http404(str(error)) from error
            tables = [_GONE if found.record is None else _about(found.record), _audit("Audit", found.history)]
            if isinstance(store, Outbox):
                jobs = [{"cells": _job(job)} for job in found.jobs]
                tables.append({"name": "Jobs", "columns": _JOB_COLUMNS, "rows": jobs})
        return self.page(request, f"Key {redact(key)}", tables)


@admin.register(DeadLetter)
class DeadLetterAdmin(_ReadOnly):
    """What a human must look at."""

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        # By name: what operators see is a floor above the web modules.
        dead_letters = import_module("oncekey.admin.dead_letters").dead_letters
        with self.store(request) as store:
            try:
                found = dead_letters(store, PAGE)
            except OnceKeyError as error:
                return self.page(request, "Dead letters", [], problem=str(error))
        tables = [
            {"name": "Jobs", "columns": _JOB_COLUMNS, "rows": [{"cells": _job(job)} for job in found.jobs]},
            {"name": "Keys", "columns": _COLUMNS, "rows": [_row(record) for record in found.keys]},
        ]
        return self.page(request, "Dead letters", tables)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        raise Http404


_JOB_COLUMNS = ("id", "scope", "task", "state", "attempt", "last error")


def _job(job: Any) -> list[str]:
    return [job.id, job.scope, job.task, str(job.state), str(job.attempt), mask(shown(job.last_error or ""))]


def _row(record: Record) -> dict[str, Any]:
    return {"cells": _cells(record), "url": reverse("admin:oncekey_key_change", args=[quote(_name(record))])}


def _about(record: Record) -> dict[str, Any]:
    rows = [[name, value] for name, value in zip(_COLUMNS, _cells(record), strict=True)]
    response = record.response
    if response is not None:
        size = "not kept" if response.body is None else f"{len(response.body)} bytes"
        rows.append(["response", f"{response.status}, {size}"])
    return {"name": "", "columns": (), "rows": [{"cells": row} for row in rows]}


def _audit(name: str, lines: Sequence[AuditLine]) -> dict[str, Any]:
    rows = [[_time(line.at), line.who, line.event, line.before, line.after or "deleted", line.why] for line in lines]
    columns = ("at", "who", "event", "before", "after", "why")
    return {"name": name, "columns": columns, "rows": [{"cells": row} for row in rows]}


def _cells(record: Record) -> list[str]:
    return [
        redact(record.key),
        record.scope,
        record.operation,
        record.state.value,
        str(record.attempt),
        _time(record.created_at),
        _time(record.expires_at),
        mask(shown(record.last_error or "")),
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _name(record: Record) -> str:
    """Scope and masked key, for addresses of pages: they stand in the log of the server."""
    return f"{redact(record.key)} {record.scope}"


def _whole(store: Store, name: str) -> tuple[str, str]:
    masked, _, scope = name.partition(" ")
    try:
        return scope, import_module("oncekey.admin.masks").whole_key(store, scope, masked)
    except OnceKeyError as error:
        raise Http404(str(error)) from error
