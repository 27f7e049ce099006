"""gRPC: a server interceptor for ``grpc.aio``. A repeated call with the same key gets the first answer. ::

    server = grpc.aio.server(interceptors=[
        OnceInterceptor(once, {"/shop.Payments/Charge": {"effects": "repeatable"}}),
    ])

It protects the unary methods that it lists. The key is in the metadata ``idempotency-key``, in the forms of the HTTP
header. The answer is stored before it is sent, an ``abort`` of the handler too. A status that says "you must change the
call" is final and is sent again (``NOT_FOUND``, ``INVALID_ARGUMENT`` …); ``RESOURCE_EXHAUSTED`` says that nothing
happened; after every other status ``effects`` decides. A call that is not run gets a status of ``CODES``, with the text
in its details, the problem's type in the trailing metadata ``oncekey-problem``, and ``grpc-retry-pushback-ms`` where a
retry makes sense. A handler is not cancelled if its client leaves or its deadline passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from oncekey.core.header import BadKey, parse_key
from oncekey.core.problem_texts import Situation
from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.core.routes import Route
from oncekey.core.values import value
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, NotAuthenticated, NotAuthorized
from oncekey.functions.attempt import Attempt
from oncekey.functions.function import policy_for
from oncekey.functions.wire import Told, detached, tell, told

__all__ = ["CODES", "OnceInterceptor"]

CONTENT = "application/grpc"
Code = grpc.StatusCode

CODES = {
    Situation.KEY_MISSING: Code.INVALID_ARGUMENT,
    Situation.KEY_MALFORMED: Code.INVALID_ARGUMENT,
    Situation.KEY_PERSONAL: Code.INVALID_ARGUMENT,
    Situation.MISMATCH: Code.INVALID_ARGUMENT,
    Situation.IN_FLIGHT: Code.ABORTED,
    Situation.UNKNOWN: Code.FAILED_PRECONDITION,
    Situation.STORE_UNAVAILABLE: Code.UNAVAILABLE,
    Situation.UNREADABLE: Code.UNAVAILABLE,
    Situation.ANSWER_LOST: Code.FAILED_PRECONDITION,
    Situation.NOT_STORED: Code.UNAVAILABLE,
    Situation.NOT_AUTHENTICATED: Code.UNAUTHENTICATED,
    Situation.NOT_AUTHORIZED: Code.PERMISSION_DENIED,
    Situation.NOT_EXECUTED: Code.UNAVAILABLE,
    Situation.NOT_FINISHED: Code.UNAVAILABLE,
    Situation.REFUSED: Code.INVALID_ARGUMENT,
    Situation.REFUSED_LATE: Code.FAILED_PRECONDITION,
}
"""The status of every answer that oncekey itself gives."""

_STATUSES = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
}
"""What a handler's status means, as that of HTTP. Every other one is judged as a 500: it says nothing about effects."""

ScopeFunction = Callable[[Mapping[str, str | bytes]], str | Awaitable[str]]


class OnceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg,unused-ignore]
    """``methods``: full names, each with the options of ``once.function`` that are a Policy's, ``{}`` for none.

    ``scope``: a function of the call's metadata, sync or async, that returns the tenant or raises NotAuthenticated;
    needed unless the OnceKey has SINGLE_TENANT. ``required=False`` lets calls without a key pass unprotected.
    """

    def __init__(
        self,
        once: OnceKey,
        methods: Mapping[str, Mapping[str, Any]],
        *,
        scope: ScopeFunction | None = None,
        metadata: str = "idempotency-key",
        required: bool = True,
    ) -> None:
        if scope is None and once.single_tenant is None:
            raise ConfigurationError(
                "OnceInterceptor(scope=…): say whose keys these are, by a function of the call's metadata that returns "
                "the tenant. OnceKey(scope=…) reads it from an HTTP request"
            )
        self._once = once
        self._scope = scope
        self._metadata = metadata.lower()
        self._required = required
        self._routes: dict[str, Route] = {}
        for method, options in methods.items():
            if not method.startswith("/") or method.count("/") != 2:
                raise ConfigurationError(f"OnceInterceptor: {method!r} is not of the form '/package.Service/Method'")
            name = method[1:]
            self._routes[method] = Route(name, policy_for(once, name, dict(options)))
            once.declare_function(name, "OnceInterceptor", self._routes[method].policy)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler, details = await continuation(handler_call_details), handler_call_details
        route = self._routes.get(details.method)
        if handler is None or route is None:
            return handler
        if handler.unary_unary is None or not inspect.iscoroutinefunction(handler.unary_unary):
            raise ConfigurationError(
                f"OnceInterceptor protects methods with one request and one response, written as `async def`: "
                f"{details.method} is another kind, so take it off the list"
            )
        metadata: dict[str, list[str | bytes]] = {}
        for name, text in details.invocation_metadata or ():
            metadata.setdefault(name.lower(), []).append(text)
        keys = metadata.get(self._metadata, [])
        if not keys and not self._required:
            return handler

        async def protected(raw: bytes, context: Any) -> bytes:
            call = _Call(self._once, route, handler, raw, context)
            try:
                tenant = await self._tenant({name: texts[-1] for name, texts in metadata.items()})
                key = _key(keys, route)
            except (NotAuthenticated, NotAuthorized) as error:
                await call.refuse(told(error, None))
            except BadKey as error:
                missing = error.rule == "missing"
                await call.refuse(tell(Situation.KEY_MISSING) if missing else tell(Situation.KEY_MALFORMED, str(error)))
            return await call.run(tenant, key)

        return grpc.unary_unary_rpc_method_handler(protected)  # bytes in, bytes out: the answer is kept as bytes

    async def _tenant(self, metadata: Mapping[str, str | bytes]) -> str:
        if self._scope is None:
            return self._once.single_tenant or ""
        tenant = self._scope(metadata)
        return await tenant if inspect.isawaitable(tenant) else tenant


def _key(texts: list[str | bytes], route: Route) -> str:
    policy = route.policy
    return parse_key(
        [text if isinstance(text, bytes) else text.encode() for text in texts],
        min_length=policy.key_min_length,
        max_length=policy.key_max_length,
    )


@value
class _Ended:
    """How a call ends: with ``body``, or with a status."""

    body: bytes | None
    code: grpc.StatusCode = Code.OK
    details: str = ""
    trailing: tuple[tuple[str, str], ...] = ()


class _Call:
    """One protected call."""

    def __init__(self, once: OnceKey, route: Route, handler: Any, raw: bytes, context: Any) -> None:
        self.once = once
        self.route = route
        self.handler = handler
        self.raw = raw
        self.context = context

    async def refuse(self, said: Told | None) -> NoReturn:
        await self._end(_refusal(said))
        raise AssertionError("unreachable: abort() raises")  # pragma: no cover

    async def run(self, tenant: str, key: str) -> bytes:
        return await self._end(await detached(self.once, self._work(tenant, key)))

    async def _end(self, ended: _Ended) -> bytes:
        if ended.body is None:
            await self.context.abort(ended.code, ended.details, ended.trailing)
        if ended.trailing:
            self.context.set_trailing_metadata((*self.context.trailing_metadata(), *ended.trailing))
        return ended.body or b""

    async def _work(self, tenant: str, key: str) -> _Ended:
        """Run the handler or take the first answer. It does not touch the call: its client may have left."""
        read, write = self.handler.request_deserializer, self.handler.response_serializer
        request = self.raw if read is None else read(self.raw)
        # Two encodings of one message may differ in the order of a map.
        body = request.SerializeToString(deterministic=True) if hasattr(request, "SerializeToString") else self.raw
        attempt = Attempt(self.once, self.route, tenant=tenant, key=key, body=body, content_type=CONTENT, kind="GRPC")
        context, written = _Context(self.context), b""
        aborted: _Aborted | None = None
        unwritable: Exception | None = None
        try:
            async with attempt:
                if attempt.runs:
                    try:
                        response = await self.handler.unary_unary(request, context)
                        context.check_code()
                    except _Aborted as error:
                        aborted = error
                        kept = (("content-type", CONTENT), ("grpc-status", error.code.name))
                        attempt.fail(_STATUSES.get(error.code, 500), error.details.encode(), kept, error)
                    else:
                        try:
                            written = response if write is None else write(response)
                            attempt.keep(written, CONTENT)
                        except Exception as error:  # the handler has run, so its key is completed
                            unwritable = error
                            attempt.keep(None, CONTENT)
        except Exception as error:
            said = told(error, attempt)
            if said is None:
                raise
            return _refusal(said)
        if unwritable is not None:
            raise unwritable
        if aborted is not None and (attempt.answer is None or attempt.answered_by_this):
            return _Ended(None, aborted.code, aborted.details, aborted.trailing)
        if attempt.answered_by_this and attempt.runs:
            return _Ended(written)
        return _replayed(attempt.answer)


def _refusal(said: Told | None) -> _Ended:
    assert said is not None  # noqa: S101 - the callers pass exceptions of oncekey's
    trailing: tuple[tuple[str, str], ...] = (("oncekey-problem", said.situation.value),)
    if said.retry_after is not None:
        trailing += (("grpc-retry-pushback-ms", str(int(said.retry_after * 1000))),)
    return _Ended(None, CODES[said.situation], said.detail, trailing)


_REPLAYED = (("idempotency-replayed", "true"),)


def _replayed(answer: StoredResponse | None) -> _Ended:
    """The first answer again."""
    headers = {} if answer is None else dict(answer.headers)
    ours = headers.get("content-type") == CONTENT
    if answer is not None and answer.status >= 400:
        named = headers.get("grpc-status")
        code = next((each for each in Code if each.name == named), None) or _code_of(answer.status)
        details = (answer.body or b"").decode("utf-8", "replace") if ours else "The operation has failed for good."
        return _Ended(None, code, details, _REPLAYED)
    if answer is not None and answer.schema_version != RESPONSE_SCHEMA_VERSION:
        lost = "The call was done, and its response cannot be read right now. It is not done again: ask again later."
        return _Ended(None, Code.DATA_LOSS, lost, _REPLAYED)
    if answer is None or answer.body is None or not ours:
        lost = "The call was done, and its response was not kept. It is not done again."
        return _Ended(None, Code.DATA_LOSS, lost, _REPLAYED)
    return _Ended(answer.body, trailing=_REPLAYED)


def _code_of(status: int) -> grpc.StatusCode:
    return next((code for code, known in _STATUSES.items() if known == status), Code.FAILED_PRECONDITION)


class _Aborted(grpc.aio.AbortError):
    """The handler called ``context.abort``. The status is sent after it is stored."""

    def __init__(self, code: Any, details: str, trailing: Any) -> None:
        super().__init__(details)
        self.code = code if isinstance(code, grpc.StatusCode) else _by_number(code)
        self.details = details
        self.trailing = tuple(trailing)


def _by_number(number: Any) -> grpc.StatusCode:
    return next((code for code in Code if code.value[0] == number), Code.UNKNOWN)


class _Context:
    """The handler's context. ``abort`` raises, and sends nothing yet."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        raise _Aborted(code, details, trailing_metadata)

    async def abort_with_status(self, status: Any) -> NoReturn:
        raise _Aborted(status.code, status.details, status.trailing_metadata or ())

    def check_code(self) -> None:
        """A handler may set a status and return: that is an abort, too."""
        code = self._context.code()
        if code not in (None, 0, Code.OK):
            raise _Aborted(code, self._context.details() or "", self._context.trailing_metadata() or ())
