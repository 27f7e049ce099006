"""``@once.function`` before there is a OnceKey: modules of tasks are imported while Django still loads.

While the function runs, only its own writes count: ``enlist()`` on SQLite refuses a connection that has written since.
What the view around it wrote, or an earlier view of this thread, belongs to the key of that view.

The function is protected when the OnceKey is made, which its first call does. So its keys are in the database that the
settings name then, which for a test is the test database.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from oncekey.engine.direct import OnceFunction
from oncekey.engine.once import OnceKey
from oncekey.engine.transactions.adapters.django_checks import seen_in_thread
from oncekey.engine.transactions.adapters.django_entry import noted, seen_now
from oncekey.functions.function import check_function, is_async

_P = ParamSpec("_P")
_R = TypeVar("_R")


def decorator(
    get: Callable[[], OnceKey], later: Callable[[Callable[[OnceKey], Any]], None], name: str, options: dict[str, Any]
) -> Callable[[Callable[_P, _R]], OnceFunction[_P, _R]]:
    """``get`` makes the OnceKey; ``later`` registers what is declared for it, and for each one after it."""

    def decorate(function: Callable[_P, _R]) -> OnceFunction[_P, _R]:
        check_function(name, function)
        made: list[Any] = []

        def declare(once: OnceKey) -> None:
            made[:] = [once.function(name, **options)(function)]

        def of_now() -> Any:
            get()
            return made[0]

        def call(protected: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            with noted(seen_now()):
                return protected(*args, **kwargs)

        async def call_async(protected: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            with noted(await seen_in_thread(get().engine, name)):
                return await protected(*args, **kwargs)

        wrapper: Any
        if is_async(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                return await call_async(of_now(), *args, **kwargs)

            wrapper = awaited
        else:

            @functools.wraps(function)
            def called(*args: Any, **kwargs: Any) -> Any:
                return call(of_now(), *args, **kwargs)

            wrapper = called

        def with_key(key: Any, *, scope: str | None = None) -> Callable[..., Any]:
            bound = of_now().with_key(key, scope=scope)
            return functools.partial(call_async if is_async(function) else call, bound)

        wrapper.with_key = with_key
        later(declare)
        return cast("OnceFunction[_P, _R]", wrapper)

    return decorate
