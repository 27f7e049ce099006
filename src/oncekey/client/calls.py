"""The request as the rules see it, its fingerprint, and what an intent must do around it."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from oncekey.client.reading import Answer, origin
from oncekey.client.spelling import KeyForm, Spelling
from oncekey.core.fingerprint import fingerprint
from oncekey.core.values import value

COMPARED = ("if-match", "if-none-match")
"""Headers that make two requests different, as oncekey's server sees it."""
TIMESTAMP = "idempotency-timestamp"
"""When the request was made. ``Policy(max_age=…)`` of the server refuses a new key without it."""


@value
class Request:
    """A whole request."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        wanted = name.lower()
        return next((text for header, text in self.headers if header.lower() == wanted), None)

    def with_header(self, name: str, text: str) -> Request:
        others = tuple([each for each in self.headers if each[0].lower() != name.lower()])
        return Request(self.method, self.url, (*others, (name, text)), self.body)

    def to(self, url: str) -> Request:
        """The same request to another address."""
        return Request(self.method, url, tuple([h for h in self.headers if h[0].lower() != "host"]), self.body)

    def fingerprint(self) -> bytes:
        """What is asked, and of which server. JSON with other white space or another order of members is the same."""
        parts = urlsplit(self.url)
        scheme, host, port = origin(self.url)
        return fingerprint(
            method=self.method,
            path=f"{scheme}://{host}:{port}{parts.path or '/'}",
            query=parts.query.encode("utf-8", "surrogatepass"),
            content_type=self.header("content-type"),
            body=self.body,
            headers=[(n.lower().encode(), t.encode()) for n, t in self.headers if n.lower() in COMPARED],
        )


@value
class Begun:
    """An intent whose request is on disk."""

    kept: Answer | None
    """The answer that the jar has already: send nothing."""
    request: Request
    """The request to send, without its key."""
    form: KeyForm
    """That of the first try, whatever this client's own is."""
    key_seconds: float | None = None
    """How long the server still keeps the key. None: nothing is to be sent."""


class Call(Protocol):
    """What ``Attempts`` needs of an intent. Every method may block, and raises JarError if the jar fails."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    def begin(self, request: Request, form: KeyForm) -> Begun:
        """Put the request on disk, or find it there. ``form`` is that of this client."""

    def answered(self, answer: Answer) -> None:
        """This is the answer: put it on disk."""

    def left_open(self, note: str, expires: float | None, not_before: float | None) -> None:
        """A try ended without the answer."""

    def respelled(self, spelling: Spelling) -> None:
        """The server refused the key as it was spelled: the next try spells it like this."""
