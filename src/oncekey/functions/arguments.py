"""From the arguments of a call to its key, its tenant and its fingerprint.

Arguments are bound by the function's signature, so ``charge(1, 5)`` and ``charge(order=1, amount=5)`` are one call. An
argument that equals its default is left out: a deploy may add a parameter with a default while calls of the old
version are still retried.

What counts is written as JSON, with names in order. Beside JSON's own values those of ``forms.py`` have a form, and a
dataclass counts as a dict of its fields. Everything else is refused before the function runs, because two calls could
not be compared.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from oncekey.core.policy import Policy
from oncekey.core.recipe import Call, ReadLines, Recipe
from oncekey.engine.direct import Chooser
from oncekey.errors import ConfigurationError
from oncekey.functions import forms

Counted = Iterable[str] | Callable[..., Any]
"""The names of the arguments that count, or a function of some of them that returns a JSON value."""

_EXACT = 2**53
"""Up to here a float has every integer."""


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
        self._computed: Callable[[Mapping[str, Any]], Any] | None = None
        self._only: frozenset[str] | None = None
        if callable(counted):
            self._computed = self.chooser("arguments", counted)
        elif counted is not None:
            self._only = self._names("arguments", counted)
        self._ignored = self._names("ignore", ignored)
        if counted is not None and self._ignored:
            raise ConfigurationError(f"{self._at('ignore')}: it goes with all arguments; leave it out with arguments=…")

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, with defaults. TypeError: the function does not take them."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def recipe(self, policy: Policy) -> Recipe:
        """Which arguments count. A row keeps it, so that a deploy may change it (``core/recipe.py``)."""
        return Recipe.of(policy.fingerprint_fields, policy.fingerprint_headers, self._only, self._ignored)

    def call(self, bound: Mapping[str, Any], key_name: str | None) -> ReadLines:
        """How this call is compared with one whose row has another recipe. With ``arguments=lambda …`` only the value
        that it returned can be compared."""
        if self._computed is not None:
            return lambda names: ()
        return Call(lambda only, ignored: self._chosen(bound, key_name, only, ignored))

    def fingerprinted(self, bound: Mapping[str, Any], key_name: str | None) -> bytes:
        """What counts, as JSON. ConfigurationError names an argument that has no form.

        ``key_name``: the parameter whose argument is the key. It is compared as the key, in which ``42`` is ``"42"``.
        """
        if self._computed is not None:
            return _text(self._plain("arguments=…", self._computed(bound)))
        return self._chosen(bound, key_name, self._only, self._ignored)

    def _chosen(
        self, bound: Mapping[str, Any], key_name: str | None, only: frozenset[str] | None, ignored: frozenset[str]
    ) -> bytes:
        chosen = {}
        for name, argument in bound.items():
            if name in ignored or name == key_name or (only is not None and name not in only):
                continue
            plain = self._plain(f"argument {name!r}", argument, name)
            if _text(_whole(plain)) != self._defaults.get(name):
                chosen[name] = plain
        return _text(chosen)

    def has(self, name: object) -> bool:
        """Whether the function has a parameter of this name."""
        return name in self._signature.parameters

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
        return _text(_whole(_plain(parameter.default)))
    except (TypeError, ValueError, RecursionError):
        return None


def _text(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _whole(plain: Any) -> Any:
    """The value with ``5`` for ``5.0``, which are one number in JSON: to compare it with a default."""
    if isinstance(plain, float) and plain.is_integer() and abs(plain) <= _EXACT:
        return int(plain)
    if isinstance(plain, dict):
        return {name: _whole(each) for name, each in plain.items()}
    return [_whole(each) for each in plain] if isinstance(plain, list) else plain


def _plain(value: Any) -> Any:
    """The value as JSON has it. TypeError and ValueError say what has no form."""
    return forms.plain(value, _fields, text_names=True)


def _fields(value: Any) -> Any:
    """A dataclass counts as a dict of its fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    raise forms.no_form(value)
