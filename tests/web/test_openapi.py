"""What the OpenAPI document says, as pure fragments and as FastAPI serves it."""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Header
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.header import BadKey, parse_key
from oncekey.core.problems import PROFILES, ProfileName
from oncekey.core.routes import Routes
from oncekey.web.fastapi import declare_openapi, protect
from oncekey.web.openapi import declare, extension, in_words, parameter

METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


class Payment(BaseModel):
    amount: int


def make_app() -> FastAPI:
    app, router = FastAPI(), APIRouter(prefix="/payments")

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment) -> Payment:
        return payment

    @app.get("/payments")
    async def listing() -> list[Payment]:
        return []

    @router.post("/{payment_id}/refund", responses={409: {"description": "Refunded already", "model": Payment}})
    async def refund(payment_id: int) -> None: ...

    @router.put("/{payment_id}")
    async def put(payment_id: int) -> None: ...

    @app.post("/files/{name:path}")
    async def upload(name: str) -> None: ...

    @app.post("/login")
    async def login() -> None: ...

    app.include_router(router)
    return app


ROUTES: dict[str, Policy | None] = {
    "POST /payments/{id}/refund": Policy(effects="transactional", ttl=timedelta(days=7), key_per="endpoint"),
    "POST /files/{p:path}": Policy(required=False, key_format="uuid", key_min_length=36),
    "POST /login": None,
    "PUT /payments/{id}": Policy(),
}


def document(profile: ProfileName = "ietf", **options: Any) -> dict[str, Any]:
    app = make_app()
    with OnceKey("memory://", scope=SINGLE_TENANT, routes=ROUTES, profile=profile, **options) as once:
        protect(app, once)
        return app.openapi()


def key_parameters(operation: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in operation.get("parameters", ()) if item["name"].lower() == "idempotency-key"]


def operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in made["paths"].items():
        for method in METHODS & set(item):
            yield method, path, item[method]


def test_protected_operations_and_no_others_say_so() -> None:
    """Every protected operation has one key parameter and the extension; exempt and safe ones are untouched."""
    plain, made = make_app().openapi(), document()
    protected = {f"{method} {path}" for method, path, operation in operations(made) if "x-idempotency" in operation}
    assert protected == {
        "post /payments",
        "post /payments/{payment_id}/refund",
        "put /payments/{payment_id}",
        "post /files/{name}",
    }
    for method, path, operation in operations(made):
        if f"{method} {path}" in protected:
            assert len(key_parameters(operation)) == 1
        else:
            assert operation == plain["paths"][path][method]


def test_each_operation_has_its_own_policy() -> None:
    """Templates find the policy that their requests fall under, {name:path} too."""
    paths = document()["paths"]
    refund = paths["/payments/{payment_id}/refund"]["post"]
    assert refund["x-idempotency"] == {
        "required": True,
        "effects": "transactional",
        "retention_seconds": 604_800,
        "scope": "endpoint",
        "in_flight": "conflict",
    }
    assert "7 days" in key_parameters(refund)[0]["description"]
    [upload] = key_parameters(paths["/files/{name}"]["post"])
    assert (upload["required"], upload["schema"]["format"], upload["schema"]["minLength"]) == (False, "uuid", 36)
    [pay] = key_parameters(paths["/payments"]["post"])
    assert (pay["required"], pay["schema"]) == (True, {"type": "string", "minLength": 1, "maxLength": 255})
    assert "24 hours" in pay["description"]


def test_responses_declared_by_the_app_stay_in_the_document() -> None:
    """FastAPI's validation schema under 422 and an app's own 409 have ours beside them, not in their place."""
    paths = document()["paths"]
    validation = paths["/payments"]["post"]["responses"]["422"]
    assert validation["content"]["application/json"]["schema"]["$ref"].endswith("HTTPValidationError")
    assert validation["content"]["application/problem+json"]["schema"]["$ref"].endswith("IdempotencyProblem")
    assert validation["description"].startswith("Validation Error")
    conflict = paths["/payments/{payment_id}/refund"]["post"]["responses"]["409"]
    assert conflict["description"].startswith("Refunded already")
    assert set(conflict["content"]) == {"application/json", "application/problem+json"}


def test_one_media_type_for_both() -> None:
    """Where the profile and the framework answer in the same media type, either schema may come."""
    content = document("governance")["paths"]["/payments"]["post"]["responses"]["422"]["content"]
    names = [choice["$ref"].rpartition("/")[2] for choice in content["application/json"]["schema"]["anyOf"]]
    assert names == ["HTTPValidationError", "IdempotencyFault"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_statuses_are_those_of_the_wire(profile: ProfileName) -> None:
    """Statuses, media type and replay marker follow the profile; success responses name our headers."""
    responses = document(profile)["paths"]["/payments"]["post"]["responses"]
    assert {"201", "400", "409", "413", "422", "503"} == set(responses)
    media_type = "application/problem+json" if profile == "ietf" else "application/json"
    assert all(media_type in responses[status]["content"] for status in ("400", "409", "413", "503"))
    marker = {"ietf": {"Idempotency-Replayed"}, "stripe": {"Idempotent-Replayed"}, "governance": set()}[profile]
    assert set(responses["201"]["headers"]) == {"Idempotency-Key", "Idempotency-Expires"} | marker
    assert "mismatch" in responses["400" if profile == "stripe" else "422"]["content"][media_type]["examples"]


def test_401_where_the_scope_function_may_refuse() -> None:
    """A single-tenant app sends no 401; an app with tenants may."""
    with OnceKey("memory://", scope=lambda request: "tenant") as once:
        app = make_app()
        protect(app, once)
        assert "401" in app.openapi()["paths"]["/payments"]["post"]["responses"]
    assert "401" not in document()["paths"]["/payments"]["post"]["responses"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_examples_fit_their_schema(profile: ProfileName) -> None:
    """Every reference leads somewhere, and every example has the members that its schema requires."""
    made = document(profile, docs_url="https://docs.example/keys/")
    for _, _, operation in operations(made):
        for response in operation["responses"].values():
            assert response["description"]
            for content in response.get("content", {}).values():
                for example in content.get("examples", {}).values():
                    value = resolve(made, example)["value"]
                    assert any(
                        fits(made, schema, value) for schema in content["schema"].get("anyOf", [content["schema"]])
                    )
            for header in response.get("headers", {}).values():
                assert resolve(made, header)["schema"]["type"] in ("string", "integer")


def resolve(made: dict[str, Any], fragment: dict[str, Any]) -> Any:
    if "$ref" not in fragment:
        return fragment
    found: Any = made
    for part in fragment["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return found


def fits(made: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    schema = resolve(made, schema)
    if schema.get("type") == "object":
        known = schema["properties"]
        return set(schema.get("required", ())) <= set(value) <= set(known) and all(
            fits(made, known[name], member) for name, member in value.items()
        )
    if schema.get("type") == "array":
        return all(fits(made, schema["items"], item) for item in value)
    return isinstance(value, {"string": str, "integer": int}[schema["type"]])


@pytest.mark.parametrize("profile", PROFILES)
def test_the_document_is_valid_openapi(profile: ProfileName) -> None:
    """The validator of the OpenAPI project's schema has nothing to say about 3.1, nor about 3.0."""
    validator = pytest.importorskip("openapi_spec_validator")
    made = document(profile)
    validator.OpenAPIV31SpecValidator(made).validate()
    app = FastAPI()
    app.openapi_version = "3.0.3"
    app.post("/login")(lambda: None)
    with OnceKey("memory://", scope=lambda request: "t", profile=profile) as once:
        protect(app, once)
        validator.OpenAPIV30SpecValidator(app.openapi()).validate()


def test_a_header_that_the_endpoint_declares_is_not_declared_twice() -> None:
    """Two parameters of one name are invalid: ours takes the place, and the app's own words stay."""
    app = FastAPI()

    @app.post("/payments")
    async def pay(idempotency_key: Annotated[str | None, Header(description="My words")] = None) -> None: ...

    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        protect(app, once)
    [declared] = key_parameters(app.openapi()["paths"]["/payments"]["post"])
    assert (declared["required"], declared["description"]) == (True, "My words")


async def test_served_document_is_cached_until_routes_change() -> None:
    """/openapi.json has the declaration, routes added later are in it, and an unchanged document is made once."""
    app = make_app()
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        protect(app, once)
        assert app.openapi() is app.openapi()
        app.post("/later")(lambda: None)
        app.openapi_schema = None  # older FastAPI does not notice by itself
        assert "x-idempotency" in app.openapi()["paths"]["/later"]["post"]
        mounted = FastAPI()
        mounted.post("/inner")(lambda: None)
        app.mount("/sub", mounted)
        app.openapi = plain = lambda: {"openapi": "3.1.0", "paths": {"/mine": {"post": {}}}}  # type: ignore[method-assign]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            served = (await client.get("/openapi.json")).json()
            of_mounted = (await client.get("/sub/openapi.json")).json()
    assert "x-idempotency" in served["paths"]["/mine"]["post"]
    assert "x-idempotency" in of_mounted["paths"]["/inner"]["post"]
    assert plain() == {"openapi": "3.1.0", "paths": {"/mine": {"post": {}}}}


def test_the_prefix_of_a_mount_counts() -> None:
    """A document with paths of its own is matched where it is mounted."""
    routes = Routes(Policy(methods=frozenset({"PATCH"})), {"POST /sub/inner": Policy()})
    there: dict[str, Any] = {"paths": {"/inner": {"post": {"responses": {}}}}}
    assert "x-idempotency" not in declare(there, routes.match)["paths"]["/inner"]["post"]
    assert "x-idempotency" in declare(there, routes.match, prefix="/sub")["paths"]["/inner"]["post"]


def test_the_input_is_left_alone_and_names_in_use_too() -> None:
    """declare() copies; a component that has our name and another meaning keeps it."""
    mine = {"type": "string"}
    there = {
        "components": {"schemas": {"IdempotencyProblem": mine}},
        "paths": {"/p": {"post": {"responses": {"default": {"description": "x"}, "409": {"$ref": "#/elsewhere"}}}}},
    }
    before = copy.deepcopy(there)
    made = declare(there, Routes(Policy()).match)
    assert there == before
    assert made["components"]["schemas"]["IdempotencyProblem"] == mine
    assert made["components"]["schemas"]["IdempotencyProblem_"]["type"] == "object"
    responses = made["paths"]["/p"]["post"]["responses"]
    assert responses["409"] == {"$ref": "#/elsewhere"}
    assert "Idempotency-Key" in responses["default"]["headers"]
    json.dumps(made)


def test_declare_openapi_works_without_the_middleware() -> None:
    """The declaration can be had without the middleware, for an app whose gateway has it."""
    app = make_app()
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        declare_openapi(app, once)
    assert "x-idempotency" in app.openapi()["paths"]["/payments"]["post"]
    assert not app.user_middleware


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (86_400, "24 hours"),
        (172_800, "2 days"),
        (604_800, "7 days"),
        (3_600, "1 hour"),
        (5_400, "90 minutes"),
        (90_000, "25 hours"),
        (61, "61 seconds"),
        (60, "1 minute"),
        (1.4, "1 second"),
    ],
)
def test_lengths_of_time_in_words(seconds: float, words: str) -> None:
    """As a person would say it, exact, and without a plural for one."""
    assert in_words(seconds) == words


def test_the_extension_of_a_policy() -> None:
    """It says what the policy says."""
    assert extension(Policy(required=False, in_flight="wait"))["in_flight"] == "wait"
    assert extension(Policy(required=False))["required"] is False


@given(
    st.text(st.characters(codec="ascii", categories=("Lu", "Nd", "Pd", "Zs", "Po")), max_size=40) | st.uuids().map(str)
)
def test_strict_schema_accepts_every_key_that_the_parser_accepts(key: str) -> None:
    """A quoted key that is accepted on the wire fits the declared pattern and lengths, with and without a format."""
    value = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    for policy in (Policy(key_syntax="strict"), Policy(key_syntax="strict", key_format="uuid")):
        schema = parameter(policy)["schema"]
        try:
            parse_key([value.encode()], syntax="strict", key_format=policy.key_format)
        except BadKey:
            continue
        assert re.search(schema["pattern"], value)
        assert schema["minLength"] <= len(value) <= schema["maxLength"]


def test_examples_of_the_document_are_valid_keys() -> None:
    """What the document shows as an example is accepted on the wire."""
    for policy in (Policy(), Policy(key_format="uuid"), Policy(key_syntax="strict")):
        shown = parameter(policy)["example"]
        found = parse_key([shown.encode()], syntax=policy.key_syntax, key_format=policy.key_format)
        assert str(uuid.UUID(found)) == found
