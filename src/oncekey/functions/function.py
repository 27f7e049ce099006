"""``@once.function``: a function, sync or async, whose repeated calls get the first result.

``attempt.py`` drives the key; this module makes an attempt of a call. The decorated function stays a function, and an
async one stays a coroutine function, so that task queues take it as they take every other. Put ``@once.function``
*below* the decorator of a queue: the queue must call the protected function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

from oncekey.core.by_operation import is_name
from oncekey.core.declarations import place_of
from oncekey.core.policy import Policy
from oncekey.core.routes import MAX_NAME_LENGTH, Route
from oncekey.engine.direct import Chooser, Codec, OnceFunction
from oncekey.engine.once import SINGLE_SCOPE, OnceKey
from oncekey.engine.request import SingleTenant
from oncekey.errors import ConfigurationError, NotExecuted
from oncekey.functions.arguments import Arguments, Counted
from oncekey.functions.attempt import Attempt
from oncekey.functions.results import Results

_P = ParamSpec("_P")
_R = TypeVar("_R")

OPTIONS = (
    *("effects", "ttl", "lease", "max_run", "in_flight", "wait", "retry_after", "begin_timeout", "quarantine"),
    *("key_per", "keep_request", "max_response_bytes", "pii"),
)
"""The options of a Policy that say something about a function. The others are about HTTP."""

_BELOW = (
    "@once.function({name!r}) stands above the decorator that makes a task of the function, so the queue would call "
    "the function without oncekey: put @once.function directly above `def`, and the queue's decorator above it"
)
_TASK_MARKS = ("delay", "apply_async", "send_with_options")
"""What Celery, RQ and Dramatiq add to a function that they made a task of."""


class Definition:
    """What ``@once.function(…)`` was given for one function."""

    def __init__(
        self,
        once: OnceKey,
        name: str,
        function: Callable[..., Any],
        *,
        key: Chooser | None,
        scope: Chooser | SingleTenant | None,
        arguments: Counted | None,
        ignore: Iterable[str],
        codec: Codec | None,
        policy: Policy,
    ) -> None:
        check_function(name, function)
        self.once = once
        self.function = function
        self.route = Route(name, policy)
        self.arguments = Arguments(name, function, arguments, ignore)
        self._recipe = self.arguments.recipe(policy)
        self.results = Results(name, codec)
        self.is_async = is_async(function)
        self._key = None if key is None else self.arguments.chooser("key", key)
        self._key_name = key if isinstance(key, str) and self.arguments.has(key) else None
        self._tenant = once.single_tenant
        self._scope = None
        if isinstance(scope, SingleTenant):
            self._tenant = SINGLE_SCOPE
        elif scope is not None:
            self._scope = self.arguments.chooser("scope", scope)
        elif self._tenant is None:
            raise ConfigurationError(
                f"@once.function({name!r}): say whose keys these are with scope=…, the name of a parameter or a "
                "function of the parameters that returns the tenant. OnceKey(scope=…) reads it from an HTTP request, "
                "and a function has none"
            )

    def attempt(
        self, given_key: Any, given_scope: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Attempt:
        """The attempt of a call. It raises before anything runs if the call has no usable key or arguments."""
        bound = self.arguments.bound(args, kwargs)
        name = self.route.operation
        if given_key is None and self._key is None:
            raise ConfigurationError(
                f"{name} was called without a key, so a repeated call could not be recognised, and nothing ran: say "
                f"@once.function({name!r}, key=…), or call {name}.with_key(key)(…)"
            )
        key = given_key if given_key is not None or self._key is None else self._key(bound)
        text = checked_key(name, key, self.route.policy)
        key_name = self._key_name
        if key_name is not None and key_text(bound[key_name]) != text:
            key_name = None  # with_key(…) chose another key
        tenant = given_scope or (self._scope(bound) if self._scope is not None else self._tenant)
        return Attempt(
            self.once,
            self.route,
            tenant=cast("str", tenant),  # OnceKey.key_scope checks it
            key=text,
            body=self.arguments.fingerprinted(bound, key_name),
            recipe=self._recipe,
            read_lines=self.arguments.call(bound, key_name),
            kept_body=functools.partial(self.arguments.fingerprinted, bound, None),
        )

    def call(self, key: Any, scope: str | None, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.attempt(key, scope, args, kwargs), args, kwargs)

    async def call_async(self, key: Any, scope: str | None, /, *args: Any, **kwargs: Any) -> Any:
        return await self.run_async(self.attempt(key, scope, args, kwargs), args, kwargs)

    def run(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = None
        with attempt:
            if attempt.runs:
                result = self.function(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result.close()
                    raise NotExecuted(
                        f"{self.route.operation} returned a coroutine, which was not started: decorate the `async def` "
                        "itself"
                    )
                kept = self.results.keep(attempt, result)
        return self._outcome(attempt, kept)

    async def run_async(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = None
        async with attempt:
            if attempt.runs:
                kept = self.results.keep(attempt, await self.function(*args, **kwargs))
        return self._outcome(attempt, kept)

    def _outcome(self, attempt: Attempt, kept: Any) -> Any:
        with attempt.leaving:
            if kept is not None and attempt.answered_by_this:
                return self.results.of_first(kept)
            return self.results.of_answer(attempt.answer)

    def with_key(self, key: str | int | UUID, *, scope: str | None = None) -> Callable[..., Any]:
        checked_key(self.route.operation, key, self.route.policy)
        return functools.partial(self.call_async if self.is_async else self.call, key, scope)


def protect(
    once: OnceKey,
    name: str,
    *,
    key: Chooser | None,
    scope: Chooser | SingleTenant | None,
    arguments: Counted | None,
    ignore: Iterable[str],
    codec: Codec | None,
    options: dict[str, Any],
) -> Callable[[Callable[_P, _R]], OnceFunction[_P, _R]]:
    """The decorator of ``once.function``, whose docstring says what the parameters are."""
    policy = policy_for(once, name, options)

    def decorate(function: Callable[_P, _R]) -> OnceFunction[_P, _R]:
        definition = Definition(
            once, name, function, key=key, scope=scope, arguments=arguments, ignore=ignore, codec=codec, policy=policy
        )
        once.declare_function(name, place_of(function), policy)
        if definition.is_async:

            @functools.wraps(function)
            async def protected(*args: Any, **kwargs: Any) -> Any:
                return await definition.call_async(None, None, *args, **kwargs)
        else:

            @functools.wraps(function)
            def protected(*args: Any, **kwargs: Any) -> Any:
                return definition.call(None, None, *args, **kwargs)

        protected.with_key = definition.with_key  # type: ignore[attr-defined]
        return cast("OnceFunction[_P, _R]", protected)

    return decorate


def policy_for(once: OnceKey, name: Any, options: dict[str, Any]) -> Policy:
    """The function's policy: the app's, or the options. A key belongs to one function unless ``key_per`` says more."""
    if not is_name(name):
        raise ConfigurationError(
            f"@once.function(name): it takes a name of 1 to {MAX_NAME_LENGTH} characters without spaces, which stays "
            "the same for ever: keys are kept under it. Write @once.function('charge', key=…)"
        )
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ConfigurationError(
            f"@once.function({name!r}, {unknown[0]}=…): there is no such option for a function. It takes key, scope, "
            f"arguments, ignore, codec, and of a Policy {', '.join(OPTIONS)}"
        )
    if options.get("in_flight") == "accepted":
        raise ConfigurationError(
            f"@once.function({name!r}, in_flight='accepted'): it takes 'conflict', which raises InProgress, or 'wait'"
        )
    policy = (
        Policy(**{"key_per": "endpoint", **options}) if options else replace(once.default_policy, key_per="endpoint")
    )
    once.check_policy(policy)
    return policy


def checked_key(name: str, key: Any, policy: Policy) -> str:
    """The key as text. ConfigurationError says what a key must be; it does not show the key."""
    text = key_text(key)
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{name}: the key is {'None' if key is None else f'of type {type(key).__name__}'}, so a repeated call "
            "could not be recognised, and nothing ran: a key is a str, an int or a UUID"
        )
    if not text.strip() or not (text.isascii() and text.isprintable()) or len(text) > policy.key_max_length:
        raise ConfigurationError(
            f"{name}: the key is empty, longer than {policy.key_max_length} characters, or has a character that is not "
            "printable ASCII, and nothing ran: take a hash of it, such as hashlib.sha256(text.encode()).hexdigest()"
        )
    return text


def key_text(key: Any) -> Any:
    """The text of an int or a UUID; everything else as it is."""
    return str(key) if isinstance(key, UUID) or (isinstance(key, int) and not isinstance(key, bool)) else key


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_function(name: str, function: Any) -> None:
    """ConfigurationError says why ``@once.function`` cannot stand here."""
    if any(hasattr(function, mark) for mark in _TASK_MARKS):
        raise ConfigurationError(_BELOW.format(name=name))
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(
            f"@once.function({name!r}) stands at a function, and this is {type(function).__name__!r}: put it directly "
            "above `def`, below @classmethod or @staticmethod"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"@once.function({name!r}): {place_of(function)} is a generator, which runs only after its call has "
            "returned: return a list"
        )
    if hasattr(function, "with_key"):
        raise ConfigurationError(f"@once.function({name!r}): {place_of(function)} is protected already")
