"""A policy at the handler: ``@once.policy(effects="transactional")``, above or below ``@app.post``.

A declaration is an attribute of the function itself. So the decorator returns the same function, and the order of
decorators does not matter. The framework knows which requests reach the function: the web modules ask its router, and
then ``Declarations.of``. Pure.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from oncekey.core.policy import Policy
from oncekey.core.routes import Route
from oncekey.errors import ConfigurationError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""RFC 9110: they change nothing. A declaration applies to the other methods of its handler."""

_ATTRIBUTE = "__oncekey_declared__"
_MOST_LAYERS = 100


class Declaration:
    """What ``@once.policy(…)`` declares for one handler. ``policy`` None: the handler is exempt."""

    def __init__(self, of: Declarations, policy: Policy | None, target: Any) -> None:
        self.of = of
        self.policy = policy
        self.target = weakref.ref(target)
        """The function or class. A weak reference, so that an app that a test makes can be collected."""
        self.place = place_of(target)
        self.used = False
        """A route of a protected app uses it."""
        self._routes: dict[tuple[str, str], Route] = {}

    def route(self, method: str, path: str) -> Route | None:
        """The route of a request that reaches the handler by ``path``, a pattern with its parameters in braces."""
        if self.policy is None:
            return None
        route = self._routes.get((method, path))
        if route is None:
            route = self._routes[method, path] = Route(f"{method} {path}", self.policy)
            self.of.policies[route.operation] = self.policy
        return route


class Declarations:
    """The declarations of one OnceKey."""

    in_process = False
    """A handler was declared, for any OnceKey."""

    def __init__(self) -> None:
        self._all: list[Declaration] = []
        self.exist = False
        """Every request reads it."""
        self.policies: dict[str, Policy] = {}
        """By operation: the policies of declared handlers, for all routes that were found so far."""

    def declare(self, target: Any, policy: Policy | None) -> None:
        """Store ``policy`` at a function, a method, a class of methods, or a framework's handler around one."""
        function = _declarable(target)
        if self._own(function) is not None:
            raise ConfigurationError(
                f"@once.policy: {place_of(function)} has a policy of this OnceKey already; one handler has one"
            )
        declaration = Declaration(self, policy, function)
        setattr(function, _ATTRIBUTE, (*_declarations_of(function), declaration))
        self._all.append(declaration)
        self.exist = Declarations.in_process = True

    def of(self, endpoint: Any, method: str) -> Declaration | None:
        """The declaration of the handler of ``method``. The declaration of a method overrides that of its class."""
        for candidate in _candidates(endpoint, method):
            if (declaration := self._own(candidate)) is not None:
                return declaration
        return None

    def of_others(self, endpoint: Any, method: str) -> Declaration | None:
        """The declaration of the handler for another OnceKey."""
        for candidate in _candidates(endpoint, method):
            for declaration in _declarations_of(candidate):
                if declaration.of is not self:
                    return declaration
        return None

    def hidden_in(self, endpoint: Any, method: str) -> Declaration | None:
        """A declared function without a route that ``endpoint`` keeps in its closure: a decorator wrapped it, and did
        not copy the declaration."""
        if not self.unused():
            return None
        waiting, seen = [getattr(each, "__func__", each) for each in _candidates(endpoint, method)], set[int]()
        while waiting and len(seen) < _MOST_LAYERS:
            layer = waiting.pop()
            if type(layer) is not FunctionType or id(layer) in seen:  # do not touch other objects of a closure
                continue
            seen.add(id(layer))
            own = self._own(layer)
            if own is not None and not own.used:
                return own
            for cell in layer.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:  # it is empty
                    continue
        return None

    def unused(self) -> list[Declaration]:
        """Declarations that no route uses, of functions that still exist."""
        return [each for each in self._all if not each.used and each.target() is not None]

    def _own(self, function: Any) -> Declaration | None:
        return next((declaration for declaration in _declarations_of(function) if declaration.of is self), None)


def chosen_policy(given: tuple[Any, ...], options: dict[str, Any], default: Policy) -> Policy | None:
    """The policy that the arguments of ``@once.policy(…)`` give: options, a Policy, None, or nothing (the app's)."""
    if len(given) > 1 or (given and (options or not isinstance(given[0], Policy | None))):
        raise ConfigurationError(
            "@once.policy(…): it takes the options of a Policy, or one Policy, or None, which exempts; with none of "
            "these, write @once.policy(), with its parentheses"
        )
    if given:
        own: Policy | None = given[0]
        return own
    try:
        return Policy(**options) if options else default
    except TypeError as error:  # there is no such option
        raise ConfigurationError(f"@once.policy(…): {error}") from error


def place_of(target: Any) -> str:
    """``module:function``, as a command line names it."""
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', None) or '?'}:{name}"


def _declarable(target: Any) -> Any:
    """The function or class that keeps the declaration; for a bound method or a handler object, its function."""
    if isinstance(target, staticmethod | classmethod) or inspect.ismethod(target):
        return target.__func__
    handler = getattr(target, "fn", None)  # Litestar's @post(…) makes a handler object of the function
    function = target if not callable(handler) or inspect.isfunction(target) else handler
    if isinstance(function, property | str) or not callable(function):
        raise ConfigurationError(
            f"@once.policy stands at a handler, and this is {type(target).__name__!r}: put it directly above the "
            "function, the method or the class"
        )
    return function


def _candidates(endpoint: Any, method: str) -> Iterator[Any]:
    """The objects that may have the declaration: for a class-based endpoint its method, and then the class."""
    kind = endpoint if isinstance(endpoint, type) else getattr(endpoint, "view_class", None)  # the latter is Flask's
    if kind is not None:
        yield getattr(kind, method.lower(), None)
    yield endpoint
    if kind is not None:
        yield kind
    elif type(endpoint) is not FunctionType:  # an object that can be called
        yield type(endpoint).__call__
        yield type(endpoint)


def _declarations_of(candidate: Any) -> tuple[Declaration, ...]:
    """The declarations of a candidate, also through wrappers of the same function."""
    for _ in range(_MOST_LAYERS):
        # Not the declarations of a base class: a subclass may do something else.
        found: tuple[Declaration, ...] = getattr(candidate, "__dict__", {}).get(_ATTRIBUTE, ())
        if found or isinstance(candidate, type):
            return found
        if isinstance(candidate, functools.partial) or hasattr(candidate, "func"):  # the latter: Litestar's threads
            candidate = candidate.func
        elif (inner := getattr(candidate, "__wrapped__", None) or getattr(candidate, "__func__", None)) is not None:
            candidate = inner
        else:
            break
    return ()
