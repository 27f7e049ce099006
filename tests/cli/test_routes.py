"""``oncekey routes``: what it says of an app is what requests to that app meet."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar, post
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from oncekey import Policy
from oncekey.cli import main
from oncekey.errors import ConfigurationError
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.litestar import OnceKeyPlugin
from oncekey.web.route_audit import Coverage, audit
from tests.cli.audited_apps import (
    APPS,
    OWN,
    WSGI_APPS,
    Anything,
    flask,
    flask_in_starlette,
    handle,
    once,
    ours,
    protected_flask,
    raw,
    starlette,
)

Run = Callable[..., tuple[int, str, str]]


# ---------------------------------------------------------------- what it says of an app


@pytest.mark.parametrize("make", APPS)
async def test_reported_coverage_equals_the_headers_of_real_responses(make: Callable[[], Any]) -> None:
    """One request to every endpoint: our headers are on the answer exactly where it says protected."""
    app = make()
    found = audit(app).endpoints
    assert {endpoint.coverage for endpoint in found} >= {Coverage.PROTECTED, Coverage.UNPROTECTED}
    met = {}
    for number, endpoint in enumerate(found):
        # The longer kind of path under a parameter that spans slashes: where one of them is unprotected, so are both.
        path = re.sub(r"\{\w+\}|\{\w+:int\}", "7", re.sub(r"\{\w+:path\}", "7/8", endpoint.path))
        url = f"http://{endpoint.host or 'shop.test'}{path}"
        answer = await ask(app, endpoint.method, url, f"key-{number}", make in WSGI_APPS)
        assert answer.status_code < 300, (endpoint, answer.status_code)
        met[endpoint.method, endpoint.path] = "idempotency-key" in answer.headers
    said = {(e.method, e.path): e.coverage is Coverage.PROTECTED for e in found}
    assert met == said


async def ask(app: Any, method: str, url: str, key: str, is_wsgi: bool) -> httpx.Response:
    headers = {"Idempotency-Key": key}
    if is_wsgi:
        with httpx.Client(transport=httpx.WSGITransport(app)) as blocking:
            return blocking.request(method, url, headers=headers)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        return await client.request(method, url, headers=headers)


def said_of(app: Any) -> dict[str, str]:
    return {f"{e.method} {e.host}{e.path}": str(e.coverage) for e in audit(app).endpoints}


def test_every_starlette_route_is_listed_once() -> None:
    """Every route that changes something is there, once, under its whole path; nothing else is."""
    assert said_of(starlette()) == {
        "POST /payments/{id:int}": "protected",
        "POST /login": "exempt",
        "POST /things": "protected",
        "DELETE /things": "unprotected",
        "POST /anything": "protected",
        "PUT /anything": "unprotected",
        "PATCH /anything": "protected",
        "DELETE /anything": "unprotected",
        "DELETE /one": "protected",
        "PUT /files/{name:path}": "unprotected",  # the listed pattern covers one segment only
        "PURGE /purge": "unprotected",
        "PUT /sub/x": "protected",
        "POST /sub/{deep}/y": "protected",
        "DELETE /sub/{deep}/y": "exempt",
        "POST /inside/pay": "protected",
        "PUT /inside/pay": "protected",
        "PUT /around/pay": "protected",
        "POST /router/x": "protected",
        "DELETE /router/x": "protected",
        "POST /raw/{path:path}": "protected",
        "PUT /raw/{path:path}": "unprotected",
        "PATCH /raw/{path:path}": "protected",
        "DELETE /raw/{path:path}": "unprotected",
        "POST /own/kind": "protected",
        "PUT /own/kind": "unprotected",
        "PATCH /own/kind": "protected",
        "DELETE /own/kind": "unprotected",
        "POST api.test/hosted": "protected",
        "PUT api.test/hosted": "unprotected",
    }


def test_the_policy_is_the_one_that_applies() -> None:
    """Of two OnceKeys on the way, the outer one's if it wants the request, else the inner one's."""
    by_route = {(e.method, e.path): e for e in audit(starlette()).endpoints}
    assert by_route["POST", "/inside/pay"].policy == Policy()
    assert by_route["PUT", "/inside/pay"].policy == OWN
    assert (by_route["PUT", "/sub/x"].policy, by_route["PUT", "/sub/x"].listed) == (OWN, "PUT /sub/x")
    assert by_route["POST", "/login"].listed == "POST /login"
    assert "PATCH, POST" in by_route["DELETE", "/things"].why


def test_every_flask_route_is_listed_once() -> None:
    """Flask's way to write a parameter becomes ours; one that spans slashes stays one that does."""
    assert said_of(protected_flask()) == {
        "POST /billing/{id}/charge": "protected",
        "PUT /billing/{id}/charge": "unprotected",
        "POST /billing/{id}/refund": "exempt",
        "PUT /files/{name:path}": "unprotected",  # the listed pattern covers one segment only
        "DELETE /files/{name:path}": "protected",
        "PURGE /files/{name:path}": "unprotected",
    }


async def test_of_two_in_litestar_the_outer_one_has_it() -> None:
    """As at run time: the key is in the store of the one whose policy is shown."""

    @post("/pay")
    async def pay() -> str:
        return "handled"

    outer, inner = once(), once(policy=OWN)
    around = DefineMiddleware(cast("Any", IdempotencyMiddleware), once=outer)
    app = Litestar([pay], middleware=[around], plugins=[OnceKeyPlugin(inner)])
    assert [endpoint.policy for endpoint in audit(app).endpoints] == [Policy()]
    await ask(app, "POST", "http://shop.test/pay", "k", is_wsgi=False)
    assert [store.read([("single-tenant", "k")])[0] is not None for store in (outer.store, inner.store)] == [
        True,
        False,
    ]


def test_route_without_protection_is_unprotected() -> None:
    endpoint = audit(flask()).endpoints[0]
    assert (endpoint.coverage, endpoint.why) == (
        Coverage.UNPROTECTED,
        "no IdempotencyMiddleware stands in front of it",
    )


def test_listed_route_that_matches_nothing_is_named() -> None:
    """A listed route with a typing error protects or exempts nothing. One path under a parameter is not an error."""
    listed = {
        "POST /paymnts/{id}": OWN,
        "POST /payments/test": None,
        "GET /payments/{id}": OWN,
        "PUT /payments/{id}": OWN,
    }
    app = Starlette(routes=[Route("/payments/{id}", handle, methods=["POST", "GET"])], middleware=[ours(listed)])
    assert audit(app).unused == ("POST /paymnts/{id}", "PUT /payments/{id}")
    assert audit(flask_in_starlette()).unused == ("POST /billing/{id}/refund",)


@pytest.mark.parametrize("app", [raw, Anything(), IdempotencyMiddleware(raw, once()), CORSMiddleware(raw)])
def test_app_whose_routes_cannot_be_read_is_named(app: Any) -> None:
    """It is said, and not taken for an app that has none."""
    with pytest.raises(ConfigurationError, match="no list of routes"):
        audit(app)


def test_an_app_inside_of_itself() -> None:
    """It ends."""
    middleware = CORSMiddleware(raw)
    middleware.app = middleware
    with pytest.raises(ConfigurationError, match="no list of routes"):
        audit(middleware)


def test_an_app_with_no_routes_yet() -> None:
    assert audit(Starlette()).endpoints == ()


# ---------------------------------------------------------------- the command

SHOP = """
from oncekey import OnceKey, Policy, SINGLE_TENANT
from oncekey.web.asgi import IdempotencyMiddleware
from starlette.applications import Starlette
from starlette.routing import Route

async def handle(request): ...

once = OnceKey("memory://", scope=SINGLE_TENANT, routes={
    "POST /login": None, "POST /tips": Policy(required=False, in_flight="wait"), "POST /old": None,
})
paths = {"/payments": "POST", "/login": "POST", "/tips": "POST"}
app = Starlette(routes=[Route(path, handle, methods=[method]) for path, method in paths.items()])
app.add_middleware(IdempotencyMiddleware, once=once)

def make():
    app.add_route("/payments/{id}", handle, methods=["PUT"])
    return app

nothing = 7
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``oncekey routes`` in a folder with ``shop.py``: exit code, standard output, standard error."""
    (tmp_path / "shop_to_audit.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", "routes", *arguments])
        sys.modules.pop("shop_to_audit", None)
        with pytest.raises(SystemExit) as ended:
            main()
        sys.modules.pop("shop_to_audit", None)
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_listing_has_a_line_with_a_reason_per_route(run: Run) -> None:
    """A line per route: what it is, and why. Without an unprotected one, --strict is content."""
    code, out, error = run("shop_to_audit:app", "--strict")
    assert (code, error) == (0, "")
    assert out.splitlines() == [
        "POST  /payments  protected  external, kept 24 hours, key required; the app's policy",
        'POST  /login     exempt     routes={"POST /login": None}',
        (
            "POST  /tips      protected  external, kept 24 hours, key optional: without one, it runs every time, "
            'duplicates in flight: wait; routes={"POST /tips": …}'
        ),
        "",
        "3 that change something: 2 protected, 1 exempt, 0 unprotected",
        "listed, and no route of the app: POST /old",
    ]


def test_strict_fails_on_an_unprotected_route(run: Run) -> None:
    """An unprotected route fails --strict, and only that."""
    code, out, error = run("shop_to_audit:make", "--factory")
    assert (code, error) == (0, "")
    assert "PUT   /payments/{id}  UNPROTECTED  the policy protects PATCH, POST, and this route is not declared\n" in out
    code, again, error = run("shop_to_audit:make", "--factory", "--strict")
    assert (code, again) == (1, out)
    assert error.startswith("oncekey: 1 route is unprotected: ")


def test_routes_with_json_print_one_document(run: Run) -> None:
    code, out, _ = run("shop_to_audit:make", "--factory", "--json", "--strict")
    said = json.loads(out)
    assert (code, said["protected"], said["exempt"], said["unprotected"], said["unused"]) == (1, 2, 1, 1, ["POST /old"])
    assert said["routes"][1] == {
        "method": "POST",
        "path": "/login",
        "host": None,
        "coverage": "exempt",
        "policy": None,
        "listed": "POST /login",
        "handler": None,
        "why": None,
    }
    assert said["routes"][0]["policy"]["effects"] == "external"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("shop_to_audit", "not of the form module:name"),
        ("shop_to_audit:app2", "has no 'app2'"),
        ("shop_not_there:app", "no module 'shop_not_there'"),
        ("shop_to_audit:nothing", "no app: it cannot be called"),
        ("shop_to_audit:make", "--factory"),
    ],
)
def test_target_that_is_no_app_exits_1_with_one_sentence(run: Run, target: str, words: str) -> None:
    """One sentence that says what to give, and exit code 1."""
    code, out, error = run(target)
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert words in error


@pytest.mark.parametrize("name", ["shop", "tea"])
def test_the_docs_show_it_as_it_is(run: Run, name: str) -> None:
    """The examples of docs/coverage.md: their apps, and what is printed."""
    text = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
    (source,) = re.findall(rf"```python\n(# {name}.py\n.*?)```", text, re.DOTALL)
    (shown,) = re.findall(rf"```\n\$ oncekey routes {name}:app\n(.*?)```", text, re.DOTALL)
    Path(f"{name}.py").write_text(source)
    sys.modules.pop(name, None)
    assert run(f"{name}:app") == (0, shown, "")
    code, _, error = run(f"{name}:app", "--strict")
    assert (code, error.partition(":")[2].partition(":")[0]) == (1, " 1 route is unprotected")
    sys.modules.pop(name, None)


DECLARING = """
from flask import Flask
from oncekey import OnceKey, Policy, SINGLE_TENANT
from oncekey.web.flask import protect

once = OnceKey("memory://", scope=SINGLE_TENANT, routes={"POST /listed": Policy()})
app = Flask(__name__)
protect(app, once, only="declared")

@app.post("/pay")
@once.policy(effects="repeatable")
def pay(): ...

@app.post("/listed")
def listed(): ...

@once.policy()
def elsewhere(): ...

def contradicting():
    app.post("/listed", endpoint="again")(once.policy()(lambda: None))
    return app
"""


def test_declarations_at_handlers_in_json(run: Run) -> None:
    Path("shop_to_audit.py").write_text(DECLARING)
    code, out, _ = run("shop_to_audit:app", "--json", "--strict")
    said = json.loads(out)
    places = {route["path"]: (route["listed"], route["handler"]) for route in said["routes"]}
    assert places == {"/pay": (None, "shop_to_audit:pay"), "/listed": ("POST /listed", None)}
    assert (code, said["unused_handlers"]) == (0, ["shop_to_audit:elsewhere"])
    assert "@once.policy, and no route of the app leads there: shop_to_audit:elsewhere\n" in run("shop_to_audit:app")[1]


def test_contradicting_declarations_exit_with_1_and_both_places(run: Run) -> None:
    Path("shop_to_audit.py").write_text(DECLARING)
    code, out, error = run("shop_to_audit:contradicting", "--factory")
    assert (code, out) == (1, "")
    assert "POST /listed has two declarations: @once.policy at shop_to_audit:contradicting" in error
    assert 'routes={"POST /listed": …}' in error


def test_resolvers_of_functions_and_queues_are_not_listed_though_no_route_has_them(run: Run) -> None:
    more = "".join(
        f"once.resolver({name!r})(print)\n" for name in ("charge", "shop.Payments/Charge", "message payments")
    )
    Path("shop_to_audit.py").write_text(DECLARING + more)
    code, out, _ = run("shop_to_audit:app", "--json")
    assert (code, json.loads(out)["unused_functions"]) == (0, [])
    assert "never called" not in run("shop_to_audit:app")[1]


def test_resolver_of_no_route_is_listed(run: Run) -> None:
    Path("shop_to_audit.py").write_text(DECLARING + "once.resolver('POST /payy')(print)\n")
    assert json.loads(run("shop_to_audit:app", "--json")[1])["unused_functions"] == ["resolver of POST /payy"]
    assert "no route of the app has that operation: resolver of POST /payy\n" in run("shop_to_audit:app")[1]


def test_routes_that_look_at_their_keys_say_so(run: Run) -> None:
    Path("shop_to_audit.py").write_text(DECLARING.replace("Policy()}", 'Policy(pii="warn")}'))
    assert "key required, personal keys: warn; routes=" in run("shop_to_audit:app")[1]
    assert json.loads(run("shop_to_audit:app", "--json")[1])["routes"][-1]["policy"]["pii"] == "warn"
