"""``oncekey routes``: every state-changing route of an app, and whether a retry of it runs once."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from oncekey.cli.loader import load
from oncekey.cli.options import AsJson, print_json
from oncekey.core.policy import Policy
from oncekey.errors import ConfigurationError
from oncekey.web.openapi import extension, in_words
from oncekey.web.route_audit import Audit, Coverage, Endpoint, audit


def register(app: typer.Typer) -> None:
    app.command("routes")(routes)


def routes(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, as a server takes it: shop.main:app.")],
    factory: Annotated[bool, typer.Option("--factory", help="It is a function that makes the app.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a route is unprotected; for CI.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the routes that change something (all but GET, HEAD, OPTIONS, TRACE) and what protects each.

    For Starlette, FastAPI, Litestar and Flask, with what is mounted and included in them.
    The app is imported, and not run.
    A route is protected, or exempt because routes={"POST /login": None} or @once.exempt says so, or unprotected.
    With only="declared", a route without a declaration is unprotected.

    Exit codes: 0 listed; 1 the app cannot be read, or its declarations contradict each other, or with --strict: a route
    is unprotected; 2 a wrong option.
    """
    found = audit(_app(target, factory))
    if as_json:
        print_json(_as_json(target, found))
    else:
        for line in _lines(found):
            print(line)
    if strict and (count := found.count(Coverage.UNPROTECTED)):
        routes = "1 route is" if count == 1 else f"{count} routes are"
        print(
            f"oncekey: {routes} unprotected: put the middleware in front, give the handler @once.policy(…) or list the "
            'route with a policy, or exempt it: @once.exempt, or routes={"PUT /path": None}',
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _app(target: str, factory: bool) -> object:
    found = load(target, object, "the module and name of your app, such as shop.main:app")
    if not callable(found):
        raise ConfigurationError(f"'{target}' is of type {type(found).__name__}, and no app: it cannot be called")
    return found() if factory else found


def _lines(found: Audit) -> list[str]:
    rows = [(e.method, f"{e.host}{e.path}", _status(e), _detail(e)) for e in found.endpoints]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    counts = ", ".join(f"{found.count(coverage)} {coverage}" for coverage in Coverage)
    lines.append(f"{'' if not lines else chr(10)}{len(rows)} that change something: {counts}")
    lines += [f"listed, and no route of the app: {listed}" for listed in found.unused]
    lines += [f"@once.policy, and no route of the app leads there: {place}" for place in found.unused_handlers]
    lines += [f"never called, since no route of the app has that operation: {each}" for each in found.unused_functions]
    return lines


def _status(endpoint: Endpoint) -> str:
    """The coverage; ``UNPROTECTED`` in capitals, so that it is seen without colours."""
    return endpoint.coverage.upper() if endpoint.coverage is Coverage.UNPROTECTED else str(endpoint.coverage)


def _detail(endpoint: Endpoint) -> str:
    if endpoint.policy is not None:
        return f"{_policy(endpoint.policy)}; {_place(endpoint)}"
    return endpoint.why or _place(endpoint)


def _place(endpoint: Endpoint) -> str:
    """The place of the declaration that decided."""
    if endpoint.handler is not None:
        return f"@once.policy{'(None)' if endpoint.policy is None else ''} at {endpoint.handler}"
    if endpoint.listed is None:
        return "the app's policy"
    return f'routes={{"{endpoint.listed}": {"None" if endpoint.policy is None else "…"}}}'


def _policy(policy: Policy) -> str:
    words = [policy.effects, f"kept {in_words(policy.retention_seconds)}"]
    words.append("key required" if policy.required else "key optional: without one, it runs every time")
    if policy.in_flight != "conflict":
        words.append(f"duplicates in flight: {policy.in_flight}")
    if policy.pii is not None:
        words.append(f"personal keys: {policy.pii}")
    return ", ".join(words)


def _as_json(target: str, found: Audit) -> dict[str, Any]:
    return {
        "app": target,
        **{str(coverage): found.count(coverage) for coverage in Coverage},
        "routes": [
            {
                "method": endpoint.method,
                "path": endpoint.path,
                "host": endpoint.host or None,
                "coverage": str(endpoint.coverage),
                "policy": None if endpoint.policy is None else extension(endpoint.policy),
                "listed": endpoint.listed,
                "handler": endpoint.handler,
                "why": endpoint.why or None,
            }
            for endpoint in found.endpoints
        ],
        "unused": list(found.unused),
        "unused_handlers": list(found.unused_handlers),
        "unused_functions": list(found.unused_functions),
    }
