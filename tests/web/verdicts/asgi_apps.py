"""One protected endpoint in every ASGI framework, which does what a case says. Nothing here asserts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from litestar import Litestar, post
from litestar import Request as LitestarRequest
from litestar import Response as LitestarResponse
from litestar.exceptions import HTTPException as LitestarHTTPException
from litestar.exceptions import ValidationException
from litestar.response import Stream
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oncekey import NotExecuted, OutcomeUnknown, current
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from oncekey.web.litestar import OnceKeyPlugin
from tests.web.litestar_parameters import JSONBody
from tests.web.verdicts.case_runner import CaseRunner, Declined, Forgiven
from tests.web.verdicts.middleware import Asgi, Base, named


def breaks_off() -> Iterator[bytes]:
    yield b'{"half":'
    raise RuntimeError("the source of the body broke")


def location(status: int) -> dict[str, str]:
    return {"Location": "/elsewhere"} if 300 <= status < 400 else {}


def ended(runner: CaseRunner) -> Any:
    """The end of an endpoint of Starlette or FastAPI, after its work."""
    verb, status = split(runner.does)
    match verb:
        case "return":
            return JSONResponse({"run": runner.runs}, status, headers=location(status))
        case "raise":
            raise HTTPException(status, headers=location(status))
        case "stream":
            return StreamingResponse(breaks_off(), 201, media_type="application/json")
        case "unserializable":
            return {"cannot be JSON": object()}
    said_or_raised(runner)
    return JSONResponse({"run": runner.runs}, status)


def said_or_raised(runner: CaseRunner) -> None:
    """What is said alike in every framework."""
    verb, _ = split(runner.does)
    match verb:
        case "crash":
            raise RuntimeError("after the charge")
        case "crash at first":
            if runner.runs == 1:
                raise RuntimeError("after the charge")
        case "Declined":
            raise Declined
        case "Forgiven":
            raise Forgiven
        case "NotExecuted":
            raise NotExecuted("the provider was not asked")
        case "OutcomeUnknown":
            raise OutcomeUnknown("the provider did not answer")
        case "op.not_executed, return":
            current().not_executed()


def split(does: str) -> tuple[str, int]:
    """``return 402`` as (return, 402)."""
    verb, _, status = does.rpartition(" ")
    return (verb, int(status)) if status.isdecimal() else (does, 201)


def endpoint_of(runner: CaseRunner, asynchronous: bool) -> Callable[..., Any]:
    """For Starlette: an endpoint that takes a request."""

    async def pay_async(request: Request) -> Any:
        async with runner.working():
            if runner.does == "wait":
                await runner.wait()
                return JSONResponse({"late": True}, 201)
            return ended(runner)

    def pay_sync(request: Request) -> Any:
        with runner.working_blocking():
            return ended(runner)

    # FastAPI 0.118 looks names of annotations up in the module of a decorator, where Request need not be known.
    for endpoint in (pay_async, pay_sync):
        endpoint.__annotations__ = {"request": Request}
    return pay_async if asynchronous else pay_sync


def answers(status: int) -> Callable[..., Any]:
    async def handler(request: Any, error: Any) -> Response:
        return JSONResponse({"by": "error handler"}, status)

    return handler


async def crashes(request: Any, error: Any) -> Response:
    raise RuntimeError("the error handler has a bug")


# ---------------------------------------------------------------- Starlette


def starlette(runner: CaseRunner, asynchronous: bool = True) -> Any:
    app = Starlette(
        routes=[Route("/payments", endpoint_of(runner, asynchronous), methods=["POST"])],
        exception_handlers={Declined: answers(409), Forgiven: answers(200)},
    )
    app.add_middleware(IdempotencyMiddleware, once=runner.once)
    if runner.case.around:
        by_base = named(runner.case.around)[0] in Base.VERBS
        app.user_middleware.append(Middleware(Base if by_base else Asgi, runner=runner))
    return app


# ---------------------------------------------------------------- FastAPI


class Payment(BaseModel):
    amount: int


class Receipt(BaseModel):
    id: int


def fastapi(runner: CaseRunner, asynchronous: bool = True) -> Any:
    """Its routes are added after ``protect``, as the README does."""
    app = FastAPI(openapi_url=None)
    protect(app, runner.once)

    def gate() -> None:
        if runner.gate == "crash":
            raise RuntimeError("a dependency broke")
        if isinstance(runner.gate, int):
            raise HTTPException(runner.gate)

    async def pay_async(payment: Payment, response: Response) -> Any:
        async with runner.working():
            if runner.does == "wait":
                await runner.wait()
                return {"late": True}
            return said(response)

    def pay_sync(payment: Payment, response: Response) -> Any:
        with runner.working_blocking():
            return said(response)

    def said(response: Response) -> Any:
        verb, status = split(runner.does)
        if verb == "inject":
            response.status_code = status
        if verb in ("inject", "plain"):
            return {"run": runner.runs}
        if verb == "model mismatch":
            return {"no": "receipt"}
        return ended(runner)

    model = Receipt if runner.does == "model mismatch" else None
    pay = pay_async if asynchronous else pay_sync
    app.post("/payments", status_code=201, response_model=model, dependencies=[Depends(gate)])(pay)
    app.add_exception_handler(Declined, answers(409))
    app.add_exception_handler(Forgiven, answers(200))
    if runner.case.validation_handler_crashes:
        app.add_exception_handler(RequestValidationError, crashes)
    if runner.case.around:
        app.user_middleware.append(Middleware(Asgi, runner=runner))
    return app


# ---------------------------------------------------------------- Litestar


@dataclass
class Order:
    amount: int


def litestar_ended(runner: CaseRunner) -> Any:
    verb, status = split(runner.does)
    match verb:
        case "return":
            return LitestarResponse({"run": runner.runs}, status_code=status, headers=location(status))
        case "raise":
            raise LitestarHTTPException(status_code=status, headers=location(status))
        case "stream":
            return Stream(breaks_off(), status_code=201, media_type="application/json")
        case "unserializable":
            return {"cannot be JSON": object()}
    said_or_raised(runner)
    return LitestarResponse({"run": runner.runs}, status_code=status)


def litestar(runner: CaseRunner, asynchronous: bool = True) -> Any:
    def guard(connection: Any, handler: Any) -> None:
        if runner.gate == "crash":
            raise RuntimeError("a guard broke")
        if isinstance(runner.gate, int):
            raise LitestarHTTPException(status_code=runner.gate)

    async def pay_async(data: JSONBody[Order]) -> Any:
        async with runner.working():
            if runner.does == "wait":
                await runner.wait()
                return {"late": True}
            return litestar_ended(runner)

    def pay_sync(data: JSONBody[Order]) -> Any:
        with runner.working_blocking():
            return litestar_ended(runner)

    verb, status, _ = named(runner.case.around)

    def inside(app: Any) -> Any:
        return Asgi(app, runner)

    def hook(response: Any) -> Any:
        if verb == "crashing hook":
            raise RuntimeError("an after_request function broke")
        return LitestarResponse({"by": "hook"}, status_code=status)

    def by_handler(status: int) -> Callable[..., Any]:
        def handler(request: LitestarRequest, error: Exception) -> LitestarResponse:
            return LitestarResponse({"by": "error handler"}, status_code=status)

        return handler

    def broken(request: LitestarRequest, error: Exception) -> LitestarResponse:
        raise RuntimeError("the error handler has a bug")

    handlers: dict[Any, Any] = {Declined: by_handler(409), Forgiven: by_handler(200)}
    if runner.case.validation_handler_crashes:
        handlers[ValidationException] = broken
    threads: dict[str, Any] = {} if asynchronous else {"sync_to_thread": True}
    pay: Any = pay_async if asynchronous else pay_sync
    route = post(
        "/payments",
        guards=[guard],
        middleware=[inside] if verb and "hook" not in verb else [],
        after_request=hook if "hook" in verb else None,
        **threads,
    )(pay)
    return Litestar(
        route_handlers=[route],
        exception_handlers=handlers,
        openapi_config=None,
        logging_config=None,
        plugins=[OnceKeyPlugin(runner.once)],
    )


# ---------------------------------------------------------------- no framework


def raw_endpoint(runner: CaseRunner) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with runner.working():
            if runner.does == "wait":
                await runner.wait()
            elif split(runner.does)[0] == "stream":
                await send({"type": "http.response.start", "status": 201, "headers": []})
                await send({"type": "http.response.body", "body": b'{"half":', "more_body": True})
                raise RuntimeError("the source of the body broke")
            await ended(runner)(scope, receive, send)

    return app


def asgi(runner: CaseRunner) -> Any:
    app = raw_endpoint(runner)
    return IdempotencyMiddleware(Asgi(app, runner) if runner.case.around else app, runner.once)


def mounted(runner: CaseRunner) -> Any:
    """A foreign app under a path of a FastAPI app."""
    app = FastAPI(openapi_url=None)
    protect(app, runner.once)
    app.mount("/legacy", raw_endpoint(runner))
    runner.prefix = "/legacy"
    return app
