"""What is particular to Django: disconnects, streams, bodies, encodings, declarations, the order of middleware."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import httpx
import pytest

from oncekey import SINGLE_TENANT, NotAuthenticated, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.testing.http.flaky import ONE
from oncekey.testing.http.stack import until
from oncekey.webhooks import header
from tests.web.django_apps import configure, make_handler, urls
from tests.web.django_site import Site

configure()

from asgiref.sync import sync_to_async  # noqa: E402 - Django is configured first
from django.http import FileResponse, HttpResponse, JsonResponse, StreamingHttpResponse  # noqa: E402
from django.urls import re_path  # noqa: E402
from django.views import View  # noqa: E402

pytestmark = pytest.mark.frameworks
GZIP = "django.middleware.gzip.GZipMiddleware"


@pytest.fixture(params=["wsgi", "asgi"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(view: Any, **options: Any) -> Site:
        options.setdefault("asgi", request.param == "asgi")
        made.append(Site(view, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


# ---------------------------------------------------------------- disconnects


class Server:
    """An ASGI server whose client sends one request and then disconnects, when the test says so."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/pay",
            "raw_path": b"/pay",
            "query_string": b"",
            "headers": [
                (b"idempotency-key", b"k-1"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ],
        }

    async def receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def disconnected(site: Site, entered: Any, go: Any) -> None:
    server = Server()
    task = asyncio.create_task(site.app(server.scope, server.receive, server.send))
    await asyncio.to_thread(entered.wait, 10.0)
    server.gone.set()
    await asyncio.sleep(0.05)  # Django cancels the request now; the view must not notice
    go.set()
    await asyncio.wait_for(task, 10.0)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_disconnect_neither_stops_the_view_nor_the_storing(make: Callable[..., Site], kind: str) -> None:
    import threading

    entered, go, done = threading.Event(), threading.Event(), []

    def wait() -> None:
        entered.set()
        go.wait(10.0)

    def sync_view(request: Any) -> Any:
        wait()
        done.append(1)
        return HttpResponse(b"paid", status=201)

    async def async_view(request: Any) -> Any:
        await asyncio.to_thread(wait)
        done.append(1)
        return HttpResponse(b"paid", status=201)

    site = make(async_view if kind == "async" else sync_view, asgi=True)
    assert site.loop is not None
    site.loop.start(disconnected(site, entered, go)).result(20.0)
    assert (done, site.state()) == ([1], State.COMPLETED)
    assert site.post(content=b"{}", headers={"Content-Type": "application/json"}).content == b"paid"


def test_disconnect_in_a_large_stream_lets_the_view_end(make: Callable[..., Site]) -> None:
    ended: list[bool] = []

    async def view(request: Any) -> Any:
        async def pieces() -> Any:
            for _ in range(20):
                await asyncio.sleep(0)
                yield b"x" * 100
            ended.append(current().key == "k-1")

        return StreamingHttpResponse(pieces(), status=201)

    site = make(view, asgi=True, policy=Policy(max_response_bytes=500))

    async def ask() -> None:
        server = Server()

        async def send(message: Any) -> None:
            server.gone.set()
            await asyncio.sleep(0.2)  # Django 5 cancels the request now
            raise OSError("the client is gone")

        with suppress(OSError):
            await asyncio.wait_for(site.app(server.scope, server.receive, send), 10.0)

    assert site.loop is not None
    site.loop.start(ask()).result(20.0)
    gc.collect()  # Django 4.2 does not close the response, and drops it
    until(lambda: site.state() is State.COMPLETED, "the key is completed")
    assert ended == [True]


def test_lease_is_renewed_while_a_response_streams(make: Callable[..., Site]) -> None:
    """The view has returned, and its generator goes on for longer than the lease."""
    lease = timedelta(seconds=1)

    def lease_until() -> float:
        record = site.once.store.read([(ONE, "k-1")])[0]
        assert record is not None
        return record.lease_until

    async def view(request: Any) -> Any:
        async def pieces() -> Any:
            yield b"x" * 600
            first = lease_until()
            async with asyncio.timeout(15):
                while lease_until() <= first + lease.total_seconds():
                    await asyncio.sleep(0.01)
            yield b"kept"

        return StreamingHttpResponse(pieces(), status=201)

    site = make(view, asgi=True, policy=Policy(max_response_bytes=500, lease=lease))
    assert site.post().content.endswith(b"kept")
    assert site.state() is State.COMPLETED


# ---------------------------------------------------------------- bodies and responses


def test_upload_is_compared_and_the_view_reads_it(make: Callable[..., Site]) -> None:
    """Also one that is larger than DATA_UPLOAD_MAX_MEMORY_SIZE, which does not count files."""
    seen: list[Any] = []

    def view(request: Any) -> Any:
        seen.append((request.POST["name"], request.FILES["file"].size))
        return HttpResponse(status=201)

    site = make(view, policy=Policy(max_request_bytes=10_000_000))
    large: dict[str, Any] = {"data": {"name": "a"}, "files": {"file": b"x" * 3_000_000}}
    assert [site.post(**large).status_code for _ in range(2)] == [201, 201]  # with another boundary each time
    assert site.post(**{**large, "data": {"name": "b"}}).status_code == 422
    assert seen == [("a", 3_000_000)]


@pytest.mark.parametrize("read", ["body", "read", "post"])
def test_view_reads_the_body_in_every_way(make: Callable[..., Site], read: str) -> None:
    def view(request: Any) -> Any:
        text = {"body": lambda: request.body, "read": request.read, "post": lambda: request.POST.urlencode().encode()}
        return HttpResponse(text[read](), status=201)

    assert make(view).post(data={"a": "1"}).content == b"a=1"


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda request: request.body, b"name=a"),
        (lambda request: request.POST["name"], b"a"),
        (lambda request: request.headers["content-length"], b"6"),
    ],
)
def test_body_without_a_length_is_compared_and_the_view_reads_it(
    make: Callable[..., Site], read: Any, said: bytes
) -> None:
    """Under WSGI, Django alone takes a chunked body for an empty one."""
    site = make(lambda request: HttpResponse(read(request), status=201), policy=Policy(max_request_bytes=1000))
    served = site.app

    def as_gunicorn(environ: Any, start_response: Any) -> Any:
        del environ["CONTENT_LENGTH"]
        return served({**environ, "wsgi.input_terminated": True}, start_response)

    if site.loop is None:
        site.app = as_gunicorn
    assert [site.post(data={"name": "a"}).content for _ in range(2)] == [said, said]
    assert site.post(data={"name": "b"}).status_code == 422
    assert site.post("k-2", content=b"x" * 1001).status_code == 413


def test_file_is_stored_and_replayed(make: Callable[..., Site], tmp_path: Any) -> None:
    (tmp_path / "receipt.txt").write_bytes(b"paid")

    def view(request: Any) -> Any:
        return FileResponse((tmp_path / "receipt.txt").open("rb"), status=201)

    site = make(view)
    first = site.post()
    (tmp_path / "receipt.txt").write_bytes(b"other")
    again = site.post()
    assert (first.content, again.content, again.headers["idempotency-replayed"]) == (b"paid", b"paid", "true")


def test_response_is_stored_uncompressed_and_sent_as_the_client_takes_it(make: Callable[..., Site]) -> None:
    """GZipMiddleware above oncekey compresses first answers and replays; below it, nothing."""
    text = b"paid " * 200

    def view(request: Any) -> Any:
        assert "HTTP_ACCEPT_ENCODING" not in request.META
        assert "Accept-Encoding" not in request.headers
        return HttpResponse(text, status=201)

    for place in ("outside", "inside"):
        site = make(view, **{place: [GZIP]})
        for _ in range(2):
            answer = site.post(headers={"Accept-Encoding": "gzip"})
            assert answer.content == text
            assert ("content-encoding" in answer.headers) == (place == "outside")
        record = site.once.store.read([(ONE, "k-1")])[0]
        assert record is not None
        assert record.response is not None
        assert record.response.body == text
    assert gzip.compress(text) != text


def read_the_body(get_response: Any) -> Any:
    def middleware(request: Any) -> Any:
        request.read()
        return get_response(request)

    return middleware


def test_body_that_middleware_took_away_is_an_error_and_runs_nothing(
    make: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def view(request: Any) -> Any:
        ran.append(1)
        return HttpResponse()

    site = make(view, outside=["tests.web.test_django.read_the_body"])
    with caplog.at_level(logging.ERROR, "django.request"):
        assert site.post(json={}).status_code == 500
    assert (ran, site.state()) == ([], None)
    assert "above that middleware" in caplog.text


# ---------------------------------------------------------------- the caller


def by_user(request: Any) -> str:
    if not request.headers.get("x-user"):
        raise NotAuthenticated
    return str(request.headers["x-user"])


async def by_user_async(request: Any) -> str:
    return by_user(request)


def refuse_bob(request: Any, operation: str) -> None:
    from oncekey import NotAuthorized

    if request.headers["x-user"] == "bob":
        raise NotAuthorized(f"not {operation}")


def test_scope_and_authorize_get_the_request_of_django(make: Callable[..., Site]) -> None:
    site = make(lambda request: HttpResponse(status=201), scope=by_user, authorize=refuse_bob)
    assert [site.post(headers={"x-user": user}).status_code for user in ("ann", "bob", "")] == [201, 403, 401]


def test_async_scope_function_needs_no_thread(make: Callable[..., Site]) -> None:
    threads: list[str] = []

    async def scope(request: Any) -> str:
        import threading

        threads.append(threading.current_thread().name)
        return by_user(request)

    async def view(request: Any) -> Any:
        return HttpResponse(status=201)

    site = make(view, asgi=True, scope=scope)
    assert site.post(headers={"x-user": "ann"}).status_code == 201
    assert threads == ["test-loop"]


def test_request_changes_threads_only_where_django_would(
    make: Callable[..., Site], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync view under WSGI runs in the thread of its server, an async view under ASGI in the event loop."""
    import threading

    from oncekey.web.django import async_calls

    threads: list[str] = []

    def no_thread(*args: Any, **options: Any) -> Any:
        raise AssertionError("oncekey asked for a thread")

    def sync_view(request: Any) -> Any:
        threads.append(threading.current_thread().name)
        return HttpResponse(status=201)

    async def async_view(request: Any) -> Any:
        return sync_view(request)

    monkeypatch.setattr(async_calls, "sync_to_async", no_thread)
    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    asgi = "asgi" in request.node.name
    site = make(async_view if asgi else sync_view)
    assert [site.post(json={}).status_code for _ in range(2)] == [201, 201]
    assert threads == ["test-loop" if asgi else threading.current_thread().name]


def test_webhook_is_known_by_the_id_of_its_sender(make: Callable[..., Site]) -> None:
    ran: list[int] = []

    def view(request: Any) -> Any:
        ran.append(1)
        return HttpResponse(status=201)

    policy = Policy(key_from=header("webhook-id"), verify=lambda request, body: body == b"{}", effects="repeatable")
    site = make(view, routes={"POST /pay": policy})
    sent: dict[str, Any] = {"headers": {"webhook-id": "msg_1"}, "content": b"{}"}
    assert [site.post(None, **sent).status_code for _ in range(2)] == [201, 201]
    assert site.post(None, headers={"webhook-id": "msg_2"}, content=b"forged").status_code == 401
    assert ran == [1]


# ---------------------------------------------------------------- views


def test_class_based_view_is_declared_at_its_method(make: Callable[..., Site]) -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT)

    class Pay(View):
        @once.policy(effects="repeatable")
        def post(self, request: Any, number: int) -> Any:
            return JsonResponse({"operation": current().name, "effects": current().policy.effects}, status=201)

        def patch(self, request: Any, number: int) -> Any:
            return JsonResponse({"effects": current().policy.effects})

    patterns = [re_path(r"^pay/(?P<number>[0-9]{1,3})/$", Pay.as_view())]
    app = make_handler(urls(*patterns), once, asgi=False)
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://site") as client:
        said = client.post("/pay/7/", headers={"Idempotency-Key": "k-1"}).json()
        assert said == {"operation": "POST /pay/{number}/", "effects": "repeatable"}
        assert client.patch("/pay/7/", headers={"Idempotency-Key": "k-2"}).json() == {"effects": "external"}
        assert client.put("/pay/7/", headers={"Idempotency-Key": "k-3"}).status_code == 405
    once.close()


def test_async_view_under_wsgi_runs_once(make: Callable[..., Site]) -> None:
    async def view(request: Any) -> Any:
        key = await sync_to_async(lambda: current().key)()
        return HttpResponse(key.encode(), status=201)

    site = make(view)
    assert [site.post().content for _ in range(2)] == [b"k-1", b"k-1"]
    assert site.state() is State.COMPLETED


def test_view_without_a_response_is_unknown(make: Callable[..., Site]) -> None:
    site = make(lambda request: None)
    assert (site.post().status_code, site.state()) == (500, State.UNKNOWN)


def test_exception_of_oncekey_is_no_error_in_the_log_of_django(
    make: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    from oncekey import Refused

    def view(request: Any) -> Any:
        raise Refused("no such item", status=404)

    site = make(view)
    with caplog.at_level(logging.DEBUG, "django.request"):
        answer = site.post()
    assert (answer.status_code, site.state()) == (404, None)
    assert [record.levelname for record in caplog.records if record.exc_info or record.exc_text] == []


def test_word_of_a_function_inside_is_an_error_of_the_view(
    make: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    from oncekey import NotExecuted

    def view(request: Any) -> Any:
        @site.once.function("mail", key="order")
        def mail(order: str) -> None:
            raise NotExecuted("the mail server is down")

        mail("a")

    site = make(view)
    assert (site.post().status_code, site.state()) == (500, State.UNKNOWN)
    assert [bool(record.exc_info) for record in caplog.records if record.name == "django.request"] == [True]


def test_many_at_once_run_once(make: Callable[..., Site]) -> None:
    import threading

    ran, entered, go = [], threading.Event(), threading.Event()

    def view(request: Any) -> Any:
        ran.append(1)
        entered.set()
        go.wait(10.0)
        return HttpResponse(status=201)

    site = make(view)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(site.post().status_code)) for _ in range(10)]
    for thread in threads:
        thread.start()
    assert entered.wait(10.0)
    until(lambda: len(answers) == 9, "nine are refused while the first runs")
    go.set()
    for thread in threads:
        thread.join(10.0)
    assert (sorted(answers), ran) == ([201, *[409] * 9], [1])
