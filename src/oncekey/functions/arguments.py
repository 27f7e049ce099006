"""From the arguments of a call to its key, its tenant and its fingerprint.

Arguments are bound by the function's signature, so ``charge(1, 5)`` and ``charge(order=1, amount=5)`` are one call. An
argument that equals its default is left out: a deploy may add a parameter with a default while calls of the old
version are still retried.

What counts is written as JSON, with names in order. Beside JSON's own values these have a form, under a name that
begins with ``$``: Decimal, UUID, date, time, datetime, bytes, and the fields of a dataclass. An Enum counts as its
value. Everything else is refused before the function runs, because two calls could not be compared.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from oncekey.engine.direct import Chooser
from oncekey.errors import ConfigurationError

Counted = Iterable[str] | Callable[..., Any]
"""The names of the arguments that count, or a function of some of them that returns a JSON value."""


class Arguments:
    """The parameters of one function, and which of them count.

    ``counted``: their names, or a function of some of them that returns a JSON value. ``ignored``: names that do not
    count, such as the ``self`` of a bound task.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], counted: Counted | None = None, ignored: Iterable[str] = ()
    ) -> None:
        self.name = name
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters
        any_name = inspect.Parameter.VAR_KEYWORD
        self._rest = next((each.name for each in parameters.values() if each.kind is any_name), None)
        self._defaults = {each.name: text for each in parameters.values() if (text := _default_of(each)) is not None}
        self._counted: frozenset[str] | Callable[[Mapping[str, Any]], Any] | None = None
        if callable(counted):
            self._counted = self.chooser("arguments", counted)
        elif counted is not None:
            self._counted = self._names("arguments", counted)
        self._ignored = self._names("ignore", ignored)
        if self._counted is not None and self._ignored:
            raise ConfigurationError(f"{self._at('ignore')}: it goes with all arguments; leave it out with arguments=…")

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, with defaults. TypeError: the function does not take them."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def fingerprinted(self, bound: Mapping[str, Any]) -> bytes:
        """What counts, as JSON. ConfigurationError names an argument that has no form."""
        counted = self._counted
        if counted is not None and not isinstance(counted, frozenset):
            return _text(self._plain("arguments=…", counted(bound)))
        chosen = {}
        for name, argument in bound.items():
            if name in self._ignored or (counted is not None and name not in counted):
                continue
            plain = self._plain(f"argument {name!r}", argument, name)
            if _text(plain) != self._defaults.get(name):
                chosen[name] = plain
        return _text(chosen)

    def chooser(self, what: str, given: Chooser | Any) -> Callable[[Mapping[str, Any]], Any]:
        """What ``key=``, ``scope=`` or ``arguments=`` takes of the bound arguments."""
        if isinstance(given, str):
            self._names(what, [given])
            return lambda bound: self._flat(bound).get(given)
        if not callable(given) or inspect.iscoroutinefunction(given):
            raise ConfigurationError(
                f"{self._at(what)}: it takes the name of a parameter, or a plain function of the parameters"
            )
        try:
            wanted = inspect.signature(given).parameters
        except ValueError as error:  # a builtin without a signature
            raise ConfigurationError(f"{self._at(what)}: write a lambda around {given!r}") from error
        kinds = {each.kind for each in wanted.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return lambda bound: given(**self._flat(bound))
        required = [each.name for each in wanted.values() if each.default is inspect.Parameter.empty]
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
            raise ConfigurationError(f"{self._at(what)}: its function gets arguments by name: name the ones it needs")
        self._names(what, required)
        return lambda bound: given(**{name: each for name, each in self._flat(bound).items() if name in wanted})

    def _names(self, what: str, names: Any) -> frozenset[str]:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise ConfigurationError(f"{self._at(what)}: it takes a collection of names, such as ('order', 'amount')")
        chosen = frozenset(names)
        parameters = self._signature.parameters
        if unknown := sorted(map(str, chosen - parameters.keys())):
            if self._rest is not None:  # it may come in the function's **kwargs
                return chosen
            listed = ", ".join(parameters) or "none"
            constant = f". For a constant, write {what}=lambda: {unknown[0]!r}" if what in ("key", "scope") else ""
            raise ConfigurationError(
                f"{self._at(what)}: {unknown[0]!r} is no parameter; the function has: {listed}{constant}"
            )
        return chosen

    def _flat(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, also those that came in the function's own ``**kwargs``."""
        return {**(bound[self._rest] if self._rest is not None else {}), **bound}

    def _at(self, what: str) -> str:
        return f"@once.function({self.name!r}, {what}=…)"

    def _plain(self, what: str, value: Any, name: str = "…") -> Any:
        try:
            plain = _plain(value)
            _text(plain)
        except (TypeError, ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ConfigurationError(
                f"{self.name}: {what} cannot be fingerprinted, so a repeated call could not be recognised, and nothing "
                f"ran: {why}. If it does not belong to what is asked, leave it out with "
                f"@once.function({self.name!r}, ignore=[{name!r}]); otherwise choose what counts with arguments=…"
            ) from error
        return plain


def _default_of(parameter: inspect.Parameter) -> bytes | None:
    """The default as JSON; None: it has none, or none that can be compared."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return b"[]"
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return b"{}"
    if parameter.default is inspect.Parameter.empty:
        return None
    try:
        return _text(_plain(parameter.default))
    except (TypeError, ValueError, RecursionError):
        return None


def _text(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """The value as JSON has it. TypeError and ValueError say what has no form."""
    match value:
        case Enum():
            return _plain(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a number that JSON has")
            return value
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            if not all(isinstance(name, str) for name in value):
                raise TypeError("a dict has a name that is not a str")
            return {name: _plain(each) for name, each in value.items()}
        case Decimal() | UUID():
            return {f"${type(value).__name__.lower()}": str(value)}
        case datetime.date() | datetime.time():  # a datetime is a date
            return {f"${type(value).__name__.lower()}": value.isoformat()}
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no form in JSON")
