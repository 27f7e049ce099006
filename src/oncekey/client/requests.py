"""An adapter for requests::

    session = requests.Session()
    session.mount("https://api.example.com/", IdempotentAdapter())

As with the transports for httpx, bodies and answers are read into memory. ``max_retries`` of the inner adapter stays 0:
it would retry by rules of its own.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from requests.utils import get_encoding_from_headers
from urllib3.exceptions import MaxRetryError, NewConnectionError

from oncekey.client.attempts import Attempts, Rules
from oncekey.client.decisions import Kind, Seen
from oncekey.client.reading import Answer, answer_of

__all__ = ["IdempotentAdapter"]

_LOST = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
_Timeout = float | tuple[float | None, float | None] | None


class IdempotentAdapter(HTTPAdapter):
    """``adapter``: what really sends; by default a plain ``HTTPAdapter()``. The others: see ``Rules``."""

    def __init__(
        self,
        adapter: HTTPAdapter | None = None,
        *,
        rules: Rules | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        super().__init__()
        self._adapter = adapter or HTTPAdapter()
        self._rules = rules or Rules(**options)
        self._sleep = sleep

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        body = _body(request)
        headers = [(_text(name), _text(value)) for name, value in request.headers.items()]
        attempts = self._rules.attempts(request.method or "GET", request.url or "", headers, body)
        attempts.begin()
        while attempts.kept is None:
            sent = _to_send(attempts, request)
            limits = _limits(timeout, attempts.seconds_left)
            try:
                response = self._adapter.send(sent, True, limits, verify, cert, proxies)
                if attempts.kind is Kind.KEYED or response.status_code >= 300 or not stream:
                    _ = response.content
            except (requests.Timeout, *_LOST) as error:
                step = attempts.failed(_seen(error), error)
                attempts.save()
                if not step.again:
                    raise
            else:
                step = attempts.answered(_answer(response))
                attempts.save()
                if step.error:
                    response.close()
                    raise step.error
                if not step.again:
                    return _handed_back(attempts, request, response)
                response.close()
            self._sleep(step.wait)
        return _from_jar(attempts.kept, _to_send(attempts, request))

    def close(self) -> None:
        self._adapter.close()
        super().close()


def _body(request: requests.PreparedRequest) -> bytes:
    body: Any = request.body
    if body is None or isinstance(body, str):
        return (body or "").encode()
    if hasattr(body, "read"):
        body = body.read()
    elif not isinstance(body, bytes | bytearray):
        body = b"".join(part.encode() if isinstance(part, str) else part for part in body)
    return body.encode() if isinstance(body, str) else bytes(body)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _to_send(attempts: Attempts, request: requests.PreparedRequest) -> requests.PreparedRequest:
    now = attempts.request
    sent = request.copy()
    sent.url = now.url
    framing = ("content-length", "transfer-encoding")
    sent.headers = CaseInsensitiveDict([line for line in now.headers if line[0].lower() not in framing])
    sent.body = now.body or None
    sent.prepare_content_length(sent.body)
    return sent


def _limits(timeout: _Timeout, left: float) -> tuple[float, float]:
    """Connect and read: those of the caller, at most the time that is left."""
    connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    return min(connect or left, left), min(read or left, left)


def _answer(response: requests.Response) -> Answer:
    whole: Any = response._content  # False: it is a stream that was not read
    headers = [line for line in response.headers.items() if line[0].lower() != "content-encoding"]
    return answer_of(response.status_code, headers, whole or b"")


def _handed_back(
    attempts: Attempts, request: requests.PreparedRequest, response: requests.Response
) -> requests.Response:
    if attempts.kind is Kind.KEYED and 300 <= response.status_code < 400:
        request.headers.pop(attempts.form.header, None)  # requests copies the headers when it follows with a GET
    return response


def _from_jar(kept: Answer, sent: requests.PreparedRequest) -> requests.Response:
    response = requests.Response()
    response.status_code = kept.status
    response.headers = CaseInsensitiveDict(kept.headers)
    response.encoding = get_encoding_from_headers(response.headers)
    response.url, response.request = sent.url or "", sent
    response.raw = io.BytesIO(kept.body)
    response._content = kept.body
    return response


def _seen(error: requests.RequestException) -> Seen:
    if isinstance(error, requests.ConnectTimeout):
        return Seen.NOT_CONNECTED
    if isinstance(error, requests.Timeout):
        return Seen.TIMED_OUT
    cause = error.args[0] if error.args else None
    if isinstance(cause, MaxRetryError) and isinstance(cause.reason, NewConnectionError):
        return Seen.NOT_CONNECTED
    return Seen.LOST
