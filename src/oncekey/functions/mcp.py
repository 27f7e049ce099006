"""MCP: a wrapper for the tools of a server (package ``mcp``). Repeated calls with one key get the first result. ::

    @server.tool()
    @once_tool(once, "charge", effects="repeatable")
    async def charge(order: str, cents: int) -> dict: ...

The key is in the request's ``_meta``, under ``idempotency-key``. The host of the model chooses it, and sends it again
with every retry: ``client.call_tool("charge", {…}, meta={"idempotency-key": "k-1"})``. Put the decorator below
``@server.tool()``. A call that is not run gets a JSON-RPC error, whose ``data`` has the type of the problem, and
``retryAfter`` in seconds where a retry makes sense. An async tool is not cancelled if its client leaves.

Results are kept by the tool's return annotation (pydantic), so models and content blocks come back as they were.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError

from oncekey.core.declarations import place_of
from oncekey.core.problem_texts import Situation
from oncekey.engine.once import SINGLE_SCOPE, OnceKey
from oncekey.errors import (
    CallFailed,
    ConfigurationError,
    NotAuthenticated,
    NotAuthorized,
    OnceKeyError,
    ResultNotKept,
)
from oncekey.functions.attempt import Attempt
from oncekey.functions.function import Definition, checked_key, policy_for
from oncekey.functions.wire import Told, detached, tell, told

__all__ = ["NOT_RUN", "once_tool"]

NOT_RUN = -32009
"""The code of the JSON-RPC error for a call that was not run. Its own fault, such as a missing key, is -32602."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_OWN_FAULT = (
    *(Situation.KEY_MISSING, Situation.KEY_MALFORMED, Situation.KEY_PERSONAL),
    *(Situation.MISMATCH, Situation.REFUSED),
)
_INJECTED = "oncekey_context"


def once_tool(
    once: OnceKey,
    name: str,
    *,
    scope: Callable[[Any], str] | None = None,
    meta: str = "idempotency-key",
    required: bool = True,
    codec: Any = None,
    **options: Any,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Protect a tool. ``options`` are those of ``once.function`` that are a Policy's.

    ``scope``: a plain function of the tool's Context that returns the tenant or raises NotAuthenticated; needed unless
    the OnceKey has SINGLE_TENANT. ``required=False`` lets calls without a key pass unprotected.
    """
    if scope is None and once.single_tenant is None:
        raise ConfigurationError(
            f"once_tool({name!r}, scope=…): say whose keys these are, by a function of the tool's Context that returns "
            "the tenant. OnceKey(scope=…) reads it from an HTTP request"
        )
    policy = policy_for(once, name, options)

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        hints = _hints_of(function)
        given = _context_parameter(hints)
        definition = Definition(
            *(once, name, function),
            key=None,
            scope=None if once.single_tenant is not None else (lambda: SINGLE_SCOPE),
            arguments=None,
            ignore=() if given is None else (given,),
            codec=codec or _codec_for(hints.get("return", Any)),
            policy=policy,
        )
        once.declare_function(name, place_of(function), policy)

        def asked(kwargs: dict[str, Any]) -> tuple[str | None, str | None]:
            """The key and the tenant of this call; without a key None."""
            context = kwargs[given] if given is not None else kwargs.pop(_INJECTED)
            key = dict(context.request_context.meta or {}).get(meta)
            if key is None and not required:
                return None, None
            try:
                tenant = None if scope is None else scope(context)
            except (NotAuthenticated, NotAuthorized) as error:
                _refuse(told(error, None))
            if key is None:
                _refuse(tell(Situation.KEY_MISSING, f"This tool requires a key in the member {meta!r} of _meta."))
            try:
                return checked_key(name, key, policy), tenant
            except ConfigurationError:
                _refuse(tell(Situation.KEY_MALFORMED, f"The member {meta!r} of _meta is not a key: send a short text."))

        if definition.is_async:

            @functools.wraps(function)
            async def protected(*args: Any, **kwargs: Any) -> Any:
                key, tenant = asked(kwargs)
                if key is None:
                    return await cast("Any", function(*args, **kwargs))
                attempt = definition.attempt(key, tenant, args, kwargs)
                try:
                    return await detached(once, definition.run_async(attempt, args, kwargs))
                except OnceKeyError as error:
                    _answer(error, attempt)
        else:

            @functools.wraps(function)
            def protected(*args: Any, **kwargs: Any) -> Any:
                key, tenant = asked(kwargs)
                if key is None:
                    return function(*args, **kwargs)
                attempt = definition.attempt(key, tenant, args, kwargs)
                try:
                    return definition.run(attempt, args, kwargs)
                except OnceKeyError as error:
                    _answer(error, attempt)

        if given is None:  # the server passes the Context to the parameter that is annotated with it
            _add_context(protected, function, hints)
        return cast("Callable[_P, _R]", protected)

    return decorate


def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:  # a class of another function's body
        return dict(getattr(function, "__annotations__", {}))


def _context_parameter(hints: dict[str, Any]) -> str | None:
    for name, hint in hints.items():
        if any(inspect.isclass(each) and issubclass(each, Context) for each in (hint, *typing.get_args(hint))):
            return name
    return None


def _add_context(protected: Any, function: Callable[..., Any], hints: dict[str, Any]) -> None:
    """Add a parameter for the Context. Annotations are written out: as texts, they are of the tool's own module."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=hints.get(each.name, each.annotation)) for each in signature.parameters.values()
    ]
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters.insert(at, inspect.Parameter(_INJECTED, inspect.Parameter.KEYWORD_ONLY, annotation=Context))
    returns = hints.get("return", signature.return_annotation)
    protected.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
    protected.__annotations__ = {**hints, _INJECTED: Context}


class _ByAnnotation:
    """Keeps results by the tool's return annotation."""

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        self._adapter = adapter

    def dumps(self, value: Any, /) -> bytes:
        return self._adapter.dump_json(self._adapter.validate_python(value))

    def loads(self, data: bytes, /) -> Any:
        return self._adapter.validate_json(data)


def _codec_for(annotation: Any) -> _ByAnnotation | None:
    if annotation is Any:
        return None
    try:
        return _ByAnnotation(TypeAdapter(annotation))
    except PydanticSchemaGenerationError:
        return None


def _answer(error: OnceKeyError, attempt: Attempt) -> NoReturn:
    said = told(error, attempt)
    if said is not None:
        _refuse(said, error)
    if not attempt.owns(error):
        raise error
    if isinstance(error, CallFailed):
        raise MCPError(NOT_RUN, "The call with this key has failed for good.", {"status": error.status}) from error
    if isinstance(error, ResultNotKept):
        raise MCPError(
            NOT_RUN, "The call with this key was done, and its result was not kept. It is not done again."
        ) from error
    raise error


def _refuse(said: Told | None, error: BaseException | None = None) -> NoReturn:
    assert said is not None  # noqa: S101 - the callers pass exceptions of oncekey's
    data: dict[str, Any] = {"type": said.type}
    if said.retry_after is not None:
        data["retryAfter"] = said.retry_after
    raise MCPError(INVALID_PARAMS if said.situation in _OWN_FAULT else NOT_RUN, said.detail, data) from error
