"""A run in which every column that can hold contents gets a planted secret, by the ways that an app has.

Each secret is a word of its own, so that a dump shows which column leaked. Stores without transactions get what they
can hold: the routes that enlist, and the outbox, are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, OutcomeUnknown, Policy, current
from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.jobs import JobState
from oncekey.core.responses import Response
from oncekey.core.verdicts import Confirmed, StillUnknown
from oncekey.encryption import Keyring
from oncekey.errors import Dead
from oncekey.outbox.worker import Worker
from oncekey.stores.api import Outbox, Store
from oncekey.upkeep import Upkeep
from oncekey.web.starlette import protect

SCOPE = "single-tenant"
OF_REQUESTS = (
    *("flat-body", "flat-header", "refused-body", "effect-result", "kept-request", "function-result"),
    *("confirmed-body", "reason-to-confirm", "reason-to-forget", "resolvers-words", "resolvers-body"),
)
OF_TRANSACTIONS = (
    *(
        "enlisted-body",
        "enlisted-header",
        "phase-result",
        "payload",
        "deferred-payload",
        "settled-body",
        "settled-header",
    ),
    *("error-of-job", "reason-to-retry", "reason-to-discard"),
)


def planted(word: str) -> str:
    return f"PLANTED-{word}-4242"


class FullRun:
    """``connect`` opens a connection of the app's own; None: the store has no transactions. ``tenant`` has the keys."""

    def __init__(
        self,
        url: str | Store,
        keyring: Keyring | None,
        connect: Callable[[], Any] | None,
        *,
        tenant: str = SCOPE,
        **options: Any,
    ) -> None:
        self.tenant = tenant
        self.words = OF_REQUESTS + (OF_TRANSACTIONS if connect else ())
        self._connect = connect
        self._kept: list[Any] = []
        kept = Policy(stored_headers=frozenset({"content-type", "x-secret"}))
        phased = Policy(effects="phased", keep_request=True)
        own = Policy(effects="transactional" if connect else "external", stored_headers=kept.stored_headers)
        self.once = OnceKey(
            url,
            scope=SINGLE_TENANT if tenant == SCOPE else lambda request: tenant,
            policy=kept,
            routes={"POST /phased": phased, "POST /enlisted": own, "POST /deferred": own},
            encryption=keyring,
            **options,
        )
        self.charge = self.once.function("charge", key="order", scope=lambda order: tenant)(self._charge)
        self.once.resolve_with("POST /asked", self._resolve)
        self.app = Starlette(
            routes=[
                Route(f"/{name}", handler, methods=["POST"])
                for name, handler in (
                    *(("flat", self._flat), ("refused", self._refused), ("unknown", self._unknown)),
                    *(("asked", self._unknown), ("phased", self._phased)),
                    *(("enlisted", self._enlisted), ("deferred", self._deferred)),
                )
            ]
        )
        protect(self.app, self.once, upkeep=False)

    @property
    def store(self) -> Store:
        return self.once.store

    # -- handlers --------------------------------------------------------------------------------------------------

    async def _flat(self, request: Request) -> JSONResponse:
        return JSONResponse({"secret": planted("flat-body")}, 201, {"x-secret": planted("flat-header")})

    async def _refused(self, request: Request) -> JSONResponse:
        return JSONResponse({"secret": planted("refused-body")}, 409)

    async def _unknown(self, request: Request) -> JSONResponse:
        raise OutcomeUnknown("no answer")

    def _phased(self, request: Request) -> JSONResponse:
        op = current().blocking
        if self._connect is not None:
            op.phase("booked", planted, "phase-result", on=self._connection())
        op.effect("charged", planted, "effect-result", repeatable=True)
        raise RuntimeError("half done")

    def _enlisted(self, request: Request) -> JSONResponse:
        op = current().blocking
        op.enlist(self._connection())
        op.enqueue("send", {"to": planted("payload")})
        return JSONResponse({"secret": planted("enlisted-body")}, 201, {"x-secret": planted("enlisted-header")})

    def _deferred(self, request: Request) -> JSONResponse:
        op = current().blocking
        op.enlist(self._connection())
        op.defer("settle", {"to": planted("deferred-payload")})
        return JSONResponse({}, 202)

    async def _charge(self, order: str) -> str:
        return planted("function-result")

    def _connection(self) -> Any:
        assert self._connect is not None
        self._kept.append(self._connect())
        return self._kept[-1]

    def _resolve(self, inquiry: Any) -> Any:
        if inquiry.key == "asked-1":
            return Confirmed(200, {"secret": planted("resolvers-body")}, reason=planted("resolvers-words"))
        return StillUnknown(planted("resolvers-words"))

    # -- the run ---------------------------------------------------------------------------------------------------

    async def post(self, path: str, key: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            body = {"card": planted("kept-request")}
            return await client.post(f"/{path}", json=body, headers={"Idempotency-Key": key})

    async def requests(self) -> None:
        """Every route, and every key twice: the first requests go through a lane, the others through the loop."""
        for path in (
            "flat",
            "refused",
            "unknown",
            "asked",
            "phased",
            *(("enlisted", "deferred") if self._connect else ()),
        ):
            for number in range(1, 21 if path == "flat" else 4):  # a writer process needs a moment to start
                first = await self.post(path, f"{path}-{number}")
                if path in ("flat", "refused", "enlisted"):
                    again = await self.post(path, f"{path}-{number}")
                    assert (again.status_code, again.content) == (first.status_code, first.content), again.text
                    assert again.headers["idempotency-replayed"] == "true"
                    assert again.headers.get("x-secret") == first.headers.get("x-secret")

    async def functions(self) -> None:
        assert [await self.charge("order-1") for _ in range(2)] == [planted("function-result")] * 2

    def operators(self) -> None:
        seen, forgotten = (self.read(key) for key in ("unknown-1", "flat-3"))
        response = Response(200, {"secret": planted("confirmed-body")}).stored
        changes.confirm(self.store, seen, response, Audit("ann", planted("reason-to-confirm")))
        changes.forget(self.store, forgotten, Audit("ann", planted("reason-to-forget")))

    async def workers(self) -> None:
        """Some jobs are done, some are dead letters; an operator takes one up again and discards another."""
        worker = Worker(self.once)

        @worker.task("send", max_attempts=1)
        def send(context: Any, payload: Any) -> None:
            assert payload == {"to": planted("payload")}
            raise Dead(planted("error-of-job"))

        @worker.task("settle", max_attempts=1)
        def settle(context: Any, payload: Any) -> Response:
            assert payload == {"to": planted("deferred-payload")}
            if context.key == "deferred-3":
                raise ValueError(planted("error-of-job"))
            return Response(200, {"secret": planted("settled-body")}, headers={"x-secret": planted("settled-header")})

        await worker.serve(until="drained")
        assert isinstance(self.store, Outbox)
        dead = [job.id for job in self.store.jobs(JobState.DEAD, 100) if job.task == "send"]
        changes.retry_job(self.store, dead[0], Audit("ann", planted("reason-to-retry")))
        changes.discard_job(self.store, dead[1], Audit("ann", planted("reason-to-discard")))

    async def all(self) -> None:
        await self.requests()
        await self.functions()
        self.operators()
        await asyncio.to_thread(Upkeep(self.once).run_once)
        if self._connect is not None:
            await self.workers()

    def read(self, key: str) -> Any:
        (found,) = self.store.read([(self.tenant, key)])
        return found

    async def close(self) -> None:
        for connection in self._kept:
            connection.close()
        await self.once.aclose()

    def found_in(self, dump: bytes) -> set[str]:
        """The planted words in a dump."""
        return {word for word in self.words if planted(word).encode() in dump}
