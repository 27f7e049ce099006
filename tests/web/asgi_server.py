"""ASGI by hand: one request, in which a test is the server. Nothing here asserts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class AsgiServer:
    """One ASGI request, driven by hand: what the server would send in, and everything that came out."""

    announces_length = True
    """False: no Content-Length, so the request leaves the flat way at the head."""

    def __init__(
        self,
        app: Any,
        *,
        key: str | None = "k-1",
        path: str = "/payments",
        body: bytes = b'{"amount":1000,"currency":"EUR"}',
        headers: Mapping[str, str] | None = None,
        spec_version: str = "2.3",
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        fields = {"content-type": "application/json", "host": "api.test", **(headers or {})}
        if self.announces_length:
            fields.setdefault("content-length", str(len(body)))
        if key is not None:
            fields["idempotency-key"] = key
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in fields.items()],
            "client": ("127.0.0.1", 1),
            "server": ("api.test", 80),
            "state": {},
            "extensions": dict(extensions or {}),
        }
        self._app = app
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.broken = False
        """From now on the client is gone: sending raises, as servers of ASGI 2.4 do."""

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        if self.broken:
            raise OSError("the client has gone")
        self.sent.append(dict(message))

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._app(self.scope, self.incoming.get, self.send))

    @property
    def status(self) -> int:
        return next((message["status"] for message in self.sent if message["type"] == "http.response.start"), 0)

    @property
    def headers(self) -> dict[str, str]:
        start = next(message for message in self.sent if message["type"] == "http.response.start")
        return {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent if message["type"] == "http.response.body")

    @property
    def ended(self) -> bool:
        return any(m["type"] == "http.response.body" and not m.get("more_body", False) for m in self.sent)
