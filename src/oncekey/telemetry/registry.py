"""The exporters that oncekey has. To add one: its module, and its line in ``EXPORTERS``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from oncekey.core.values import value
from oncekey.errors import ConfigurationError
from oncekey.telemetry.exporter import Exporter

Telemetry = str | Exporter | Iterable[str | Exporter] | None
"""What ``OnceKey(telemetry=…)`` takes: the name of an exporter, an exporter, several of them, or None."""


@value
class Entry:
    name: str
    """Also the name of its module here, and of the extra that installs what it needs."""
    exporter: str
    """The class in that module."""


EXPORTERS = (
    Entry("prometheus", "Prometheus"),
    Entry("otel", "OpenTelemetry"),
)
KNOWN = ", ".join(repr(entry.name) for entry in EXPORTERS)


def exporters_of(given: Telemetry) -> tuple[Exporter, ...]:
    """The exporters that an app asks for, each once."""
    if given is None:
        return ()
    several = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
    found = tuple(named(each) if isinstance(each, str) else _checked(each) for each in several)
    kinds = [type(each) for each in found]
    if len(set(kinds)) < len(kinds):
        raise ConfigurationError("telemetry=…: one exporter is given twice, and would count everything twice")
    return found


_WRONG = "telemetry={!r}: it takes the name of an exporter, " + KNOWN + ", an exporter, or a list of them"


def _checked(given: object) -> Exporter:
    if isinstance(given, type) and issubclass(given, Exporter):
        raise ConfigurationError(f"telemetry={given.__name__}: that is the class; write {given.__name__}()")
    if not isinstance(given, Exporter):
        raise ConfigurationError(_WRONG.format(given))
    return given


def named(name: str) -> Exporter:
    """A new exporter by its name, with its defaults."""
    for entry in EXPORTERS:
        if entry.name == name:
            return _class_of(entry)()
    raise ConfigurationError(_WRONG.format(name))


def serving(given: Iterable[Exporter]) -> Exporter:
    """The exporter whose metrics a server can fetch over HTTP: one of these, or a new one."""
    for exporter in given:
        if exporter.serves:
            return exporter
    return next(found for entry in EXPORTERS if (found := _class_of(entry)).serves)()


def _class_of(entry: Entry) -> type[Exporter]:
    try:
        module = import_module(f"oncekey.telemetry.{entry.name}")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"telemetry='{entry.name}' needs {error.name}, which is not installed: pip install 'oncekey[{entry.name}]'"
        ) from error
    found: type[Exporter] = getattr(module, entry.exporter)
    return found
