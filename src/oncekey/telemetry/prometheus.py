"""Metrics for Prometheus: ``OnceKey(telemetry="prometheus")``, and the page ``/metrics`` as an ASGI or WSGI app. ::

    once = OnceKey("postgresql://…", scope=tenant_of, telemetry="prometheus")
    app.mount("/metrics", metrics_app())

**Several processes** (gunicorn, ``uvicorn --workers``): set ``PROMETHEUS_MULTIPROC_DIR`` to an empty folder before the
server starts. Each process then writes its numbers into files there, and the page of any process shows the sum of all
that run on this machine. docs/metrics.md has the whole of it.

The numbers of the store (unknown keys, dead letters, lag) are shown by the process that runs upkeep. They are read when
the page is fetched, at most every 10 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, multiprocess, values
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder

from oncekey.errors import ConfigurationError
from oncekey.telemetry import instruments
from oncekey.telemetry.events import Event
from oncekey.telemetry.exporter import Metrics
from oncekey.telemetry.instruments import Instrument, Readings, counter_help, counter_name
from oncekey.telemetry.store_numbers import StoreNumbers
from oncekey.telemetry.workers import workers_asked

_log = logging.getLogger("oncekey")
_MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
_UNITS = {instruments.SECONDS: "_seconds"}


def metric_name(name: str, unit: str = "") -> str:
    """``api_idempotency_begin_duration_seconds``. The client library adds ``_total`` to a counter."""
    return name.replace(".", "_") + _UNITS.get(unit, "")


class Prometheus(Metrics):
    """Counts into a registry of prometheus_client; by default into the one that every exporter of a process shares.

    ``tenants``: the busiest so many tenants have counters of their own, all others are counted as ``other``. Names of
    tenants are then on the metrics page: keep it inside of your network.
    """

    serves = True

    def __init__(self, *, tenants: int = 0, registry: CollectorRegistry = REGISTRY) -> None:
        folder = os.environ.get(_MULTIPROC)
        super().__init__(tenants=tenants, fixed_tenants=folder is not None)
        if folder is not None:
            _check(folder)
        else:
            _warn_of_workers()
        self.registry = registry
        self._metrics = _shared(registry, self)
        self._counters: dict[tuple[type[Event], tuple[str, ...]], Counter] = {}
        self._others: dict[tuple[str, tuple[str, ...]], Any] = {}

    def add(self, kind: type[Event], labels: tuple[str, ...], amount: int) -> None:
        counter = self._counters.get((kind, labels))
        if counter is None:
            family = self._metrics[counter_name(kind)]
            counter = self._counters[kind, labels] = family.labels(*labels) if labels else family
        counter.inc(amount)

    def record(self, histogram: Instrument, labels: tuple[str, ...], number: float) -> None:
        self._of(histogram, labels).observe(number)

    def shift(self, gauge: Instrument, labels: tuple[str, ...], by: int) -> None:
        self._of(gauge, labels).inc(by)

    def _of(self, instrument: Instrument, labels: tuple[str, ...]) -> Any:
        found = self._others.get((instrument.name, labels))
        if found is None:
            family = self._metrics[instrument.name]
            found = self._others[instrument.name, labels] = family.labels(*labels) if labels else family
        return found

    def drop_tenant(self, tenant: str) -> None:
        for kind, labels in [each for each in self._counters if each[1] and each[1][-1] == tenant]:
            if self.label_names(kind)[-1] == "tenant":
                del self._counters[kind, labels]
                self._metrics[counter_name(kind)].remove(*labels)

    def show_store(self, read: Readings | None) -> None:
        with _lock:
            shown = _stores.get(self.registry)
            if shown is None:
                shown = _stores[self.registry] = StorePage()
                self.registry.register(shown)
        shown.show(read)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        try:
            server = make_server(host, port, metrics_wsgi_app(self.registry), ThreadingWSGIServer, _Silent)
        except OSError as error:
            raise ConfigurationError(
                f"port {port} of {host} cannot be opened for metrics ({error.strerror}): try another"
            ) from error
        threading.Thread(target=server.serve_forever, name="oncekey-metrics", daemon=True).start()

        def end() -> None:
            server.shutdown()
            server.server_close()

        return end


_families: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()
_with_tenants: WeakKeyDictionary[CollectorRegistry, bool] = WeakKeyDictionary()
_stores: WeakKeyDictionary[CollectorRegistry, StorePage] = WeakKeyDictionary()
_lock = threading.Lock()


def _shared(registry: CollectorRegistry, exporter: Metrics) -> dict[str, Any]:
    """The metrics of a registry. All exporters of one registry share them: a name can be registered only once."""
    with _lock:
        if registry not in _families:
            _families[registry] = _made(registry, exporter)
            _with_tenants[registry] = bool(exporter.tenants)
        elif _with_tenants[registry] != bool(exporter.tenants):
            raise ConfigurationError(
                "two exporters of one registry, one with tenants=… and one without: their counters cannot have both "
                "kinds of labels. Say the same for both, or give one a registry of its own"
            )
        return _families[registry]


def _made(registry: CollectorRegistry, exporter: Metrics) -> dict[str, Any]:
    made: dict[str, Any] = {
        counter_name(kind): Counter(
            metric_name(counter_name(kind)), counter_help(kind), exporter.label_names(kind), registry=registry
        )
        for kind in instruments.COUNTERS
    }
    for each in instruments.HISTOGRAMS:
        name = metric_name(each.name, each.unit)
        made[each.name] = Histogram(name, each.help, each.labels, registry=registry, buckets=each.buckets)
    for each in instruments.PROCESS_GAUGES:
        name = metric_name(each.name, each.unit)
        made[each.name] = Gauge(name, each.help, each.labels, registry=registry, multiprocess_mode="livesum")
    return made


# -- the numbers of the store ------------------------------------------------------------------------------------------


class StorePage(StoreNumbers):
    """A collector of prometheus_client."""

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Without this, registering would ask the store."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        readings = self.now()
        for gauge in instruments.STORE_GAUGES:
            family = GaugeMetricFamily(metric_name(gauge.name, gauge.unit), gauge.help, labels=gauge.labels)
            for of, labels, number in readings:
                if of is gauge:
                    family.add_metric(labels, number)
            if family.samples:
                yield family


# -- the page ----------------------------------------------------------------------------------------------------------

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def page(accept: str = "", registry: CollectorRegistry = REGISTRY) -> tuple[str, bytes]:
    """The content type and the body of the metrics page. Blocks: it reads files, or asks the store."""
    shown = registry
    if (folder := os.environ.get(_MULTIPROC)) is not None:
        _forget_ended(folder)
        shown = CollectorRegistry()
        multiprocess.MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
        if (store := _stores.get(registry)) is not None:
            shown.register(store)
    encode, content_type = choose_encoder(accept)
    return content_type, encode(shown)


_PATHS = frozenset({"", "/", "/metrics", "/metrics/"})
"""Below the path at which the page is mounted. A server of its own has it at ``/metrics``, where Prometheus looks."""


class _Page:
    """The metrics page. ``oncekey routes`` and the labels of metrics do not count it as a route: it takes GET only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def answer(self, method: str, path: str, accept: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
        """The status, the headers and the body. Blocks, as :func:`page` does."""
        if path not in _PATHS:
            status, headers, body = HTTPStatus.NOT_FOUND, {}, b"the metrics page has no pages below it\n"
        elif method not in ("GET", "HEAD"):
            status, headers = HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"}
            body = b"the metrics page takes GET only\n"
        else:
            content_type, body = page(accept, self._registry)
            status, headers = HTTPStatus.OK, {"Content-Type": content_type}
        headers["Content-Length"] = str(len(body))
        return status, headers, b"" if method == "HEAD" else body


class MetricsApp(_Page):
    """The page as an ASGI app."""

    async def __call__(
        self, scope: Scope, _: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            raise RuntimeError("the metrics page speaks HTTP only: mount it in an app, which has the lifespan")
        path: str = scope["path"]
        root: str = scope.get("root_path") or ""
        if path == root or path.startswith(f"{root}/"):  # Starlette leaves the prefix of a mounted app in the path
            path = path[len(root) :]
        accept = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
        status, headers, body = await asyncio.to_thread(self.answer, scope["method"], path, accept)
        lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status.value, "headers": lines})
        await send({"type": "http.response.body", "body": body})


class MetricsWsgi(_Page):
    """The page as a WSGI app."""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, accept = environ.get("PATH_INFO", ""), environ.get("HTTP_ACCEPT", "")
        status, headers, body = self.answer(environ["REQUEST_METHOD"], path, accept)
        start_response(f"{status.value} {status.phrase}", list(headers.items()))
        return [body]


def metrics_app(registry: CollectorRegistry = REGISTRY) -> AsgiApp:
    """An ASGI app that shows the metrics: ``app.mount("/metrics", metrics_app())``."""
    return MetricsApp(registry)


def metrics_wsgi_app(registry: CollectorRegistry = REGISTRY) -> WsgiApp:
    """The same for WSGI: ``DispatcherMiddleware(app, {"/metrics": metrics_wsgi_app()})``."""
    return MetricsWsgi(registry)


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A fetch every 15 seconds needs no line in the log."""


# -- several processes -------------------------------------------------------------------------------------------------


def _check(folder: str) -> None:
    """Raise ConfigurationError if the processes cannot write their numbers into this folder."""
    if not Path(folder).is_dir():
        raise ConfigurationError(
            f"{_MULTIPROC} is {folder!r}, and there is no such folder: create it, empty, before the server starts"
        )
    if not values.ValueClass._multiprocess:
        raise ConfigurationError(
            f"{_MULTIPROC} was set after prometheus_client was imported, so this process counts for itself: set it in "
            "the environment of the server"
        )


@cache
def _warn_of_workers() -> None:
    """Warn once per process if the server was told to start several workers, which then count each for itself."""
    server, workers = workers_asked(sys.argv, os.environ)
    if workers > 1:
        _log.warning(
            "%s starts %s workers and %s is not set, so each counts for itself: a fetch of the metrics page shows the "
            "numbers of one of them. Set it to an empty folder before the server starts (docs/metrics.md)",
            *(server, workers, _MULTIPROC),
        )


def _forget_ended(folder: str) -> None:
    """The gauges (running handlers, open breakers) of a process that has ended no longer count. Its counters stay.

    A process that was killed cannot say so itself, and of the servers only gunicorn tells: so the page looks.
    """
    numbers = {path.stem.rpartition("_")[2] for path in Path(folder).glob("gauge_live*_*.db")}
    for pid in [int(number) for number in numbers if number.isdigit()]:
        try:
            os.kill(pid, 0)  # asks, and sends nothing
        except ProcessLookupError:
            multiprocess.mark_process_dead(pid, folder)  # type: ignore[no-untyped-call]
        except PermissionError:
            continue  # it runs, as another user
