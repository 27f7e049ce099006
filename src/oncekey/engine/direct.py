"""The ways into a OnceKey that are not an HTTP request.

The packages behind them are built on the engine, so they are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast
from uuid import UUID

from oncekey.core.declarations import Declarations
from oncekey.core.policy import Policy
from oncekey.engine.request import SingleTenant
from oncekey.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.consumers.message import Body, Message, Queue
    from oncekey.consumers.table import OnUnknown

_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)

Chooser = str | Callable[..., Any]
"""The name of a parameter, or a plain function of some of the parameters, by their names."""


class Codec(Protocol):
    """Writes and reads results. The modules ``json``, ``pickle`` and ``marshal`` are codecs."""

    def dumps(self, value: Any, /) -> bytes | str: ...
    def loads(self, data: bytes, /) -> Any: ...


class OnceFunction(Protocol[_P, _R_co]):
    """A protected function. Call it as before, or with a key that the caller chooses."""

    __name__: str

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    @staticmethod
    def with_key(key: str | int | UUID, *, scope: str | None = None) -> Callable[..., Any]:
        """The function, to be called with this key: ``charge.with_key("order-42")(order, amount)``."""
        ...


class Direct:
    """What :class:`oncekey.engine.once.OnceKey` offers beside its web integrations."""

    declarations: Declarations

    def __init__(self) -> None:
        self._functions: dict[str, str] = {}
        self._queues: dict[tuple[object, ...], Queue] = {}

    def function(
        self,
        name: str,
        *,
        key: Chooser | None = None,
        scope: Chooser | SingleTenant | None = None,
        arguments: Iterable[str] | Callable[..., Any] | None = None,
        ignore: Iterable[str] = (),
        codec: Codec | Any = None,
        **options: Any,
    ) -> Callable[[Callable[_P, _R]], OnceFunction[_P, _R]]:
        """Protect a function, sync or async: calls with the same key get the first result. ::

            @once.function("charge", key="order_id", effects="repeatable")
            def charge(order_id: str, amount: int) -> dict: ...

        ``name``       what its keys are kept under: never change it
        ``key``        the name of a parameter, or a function of some of the parameters; without it, callers use
                       ``charge.with_key(key)(…)``
        ``scope``      the tenant, in the same way; needed unless the OnceKey has SINGLE_TENANT
        ``arguments``  which arguments must be the same under one key: names, or a function of some of them. By default
                       all; ``ignore`` names exceptions
        ``codec``      an object with ``dumps`` and ``loads``, for results that are not JSON

        Everything else is an option of a Policy: ``effects``, ``ttl``, ``lease``, ``in_flight``, ``wait`` … A call in
        flight raises InProgress, an unknown outcome OutcomeUnknown, other arguments KeyReused (docs/functions.md).
        """
        protect = import_module("oncekey.functions.function").protect
        decorator = protect(
            self, name, key=key, scope=scope, arguments=arguments, ignore=ignore, codec=codec, options=options
        )
        return cast("Callable[[Callable[_P, _R]], OnceFunction[_P, _R]]", decorator)

    def declare_function(self, name: str, place: str, policy: Policy) -> None:
        """Take the name for the function at ``place``. A function that is defined again there may take it again."""
        if self._functions.setdefault(name, place) != place:
            raise ConfigurationError(
                f"@once.function({name!r}): {place} and {self._functions[name]} have one name, so calls of one would "
                "get results of the other: give one of them another name"
            )
        self.declarations.policies[name] = policy

    def message(
        self,
        queue: str,
        message_id: object,
        body: Body,
        *,
        policy: Policy | None = None,
        scope: str | None = None,
        content_type: str | None = None,
        unknown: OnUnknown = "park",
        max_attempts: int | None = 10,
    ) -> Message:
        """One delivery of a message. The block runs once, however often the broker delivers it. ::

            async with once.message("payments", message.id, message.body):  # or `with`
                await charge(message)

        If the block must not run, entering raises MessageNotRun. Its ``outcome.action`` says what to tell the broker;
        after the block, ``message.outcome`` says it. ``policy``: without one it is the app's, and keys are kept for 14
        days. ``scope``: the tenant, unless this OnceKey has SINGLE_TENANT. docs/consumers.md says more.
        """
        settings = (queue, policy, unknown, max_attempts)
        if settings not in self._queues:
            make = import_module("oncekey.consumers.message").Queue
            self._queues[settings] = make(self, queue, policy=policy, unknown=unknown, max_attempts=max_attempts)
        return self._queues[settings].message(message_id, body, scope=scope, content_type=content_type)
