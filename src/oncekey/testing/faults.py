"""Named points in the code, at which a test kills, stops or disturbs the process.

A point is a function of oncekey, with a name that says what it does. A fault acts ``before`` the function begins or
``after`` it has done its work. No other code of oncekey knows of this: a fault replaces the function with a wrapper
from outside, so a point costs nothing if no fault is installed. ``after`` means that the work is done: of a coroutine
when it has been awaited, of a flow (the generators of ``engine/``) when it has ended. A function that raises has no
"after".

In a test::

    with faults.install("effect.result", "before", faults.raising(ConnectionError("cut"))) as fault:
        ...
    assert fault.fired

In a process that is to die, before it makes its OnceKey (which looks up the verbs of its store only once)::

    faults.install_from_environment()       # ONCEKEY_FAULT=effect.call:after:kill, or …:kill:2 for the second time
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import wraps
from types import ModuleType
from typing import Any, Final, Literal, Self, get_args

from oncekey.engine.transactions import adapters
from oncekey.engine.transactions.adapters import ADAPTERS
from oncekey.stores.registry import STORES

When = Literal["before", "after"]
Action = Callable[[], None]

VARIABLE = "ONCEKEY_FAULT"

_STORES = "stores.*"
_LINKS = "engine.transactions.adapters.*"

POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    # Every request: on the general way, and on the flat way of ASGI.
    "request.begin": ("engine.engine:Engine.begin", "web.asgi_call:AsgiCall.__init__"),
    "request.finish": ("engine.engine:Engine.finish", "web.asgi_call:kept_and_sent"),
    "store.reserve": (f"{_STORES}:reserve", f"{_STORES}:both"),
    "store.swap": (f"{_STORES}:swap", f"{_STORES}:both"),
    # The transaction that the handler enlists, or that a phase opens, on the app's own connection.
    "enlist": ("engine.transactions.enlistment:enlist",),
    "enlist.open": (f"{_LINKS}:open",),
    "enlist.lock": (f"{_LINKS}:execute",),
    "enlist.guard": (f"{_LINKS}:guard",),
    "enlist.complete": (f"{_LINKS}:complete", f"{_LINKS}:complete_and_commit"),
    "enlist.commit": (f"{_LINKS}:commit", f"{_LINKS}:complete_and_commit"),
    "enlist.roll_back": (f"{_LINKS}:roll_back",),
    "enlist.release": ("engine.transactions.enlistment:Enlisted.release",),
    "enlist.settle": ("engine.transactions.outcome:settle",),
    # Steps.
    "steps.read": (f"{_STORES}:steps",),
    "phase": ("engine.steps:phase",),
    "phase.work": ("engine.steps:_work",),
    "phase.commit": ("engine.steps:_commit",),
    "effect.intent": ("engine.steps:_intend",),
    "effect.call": ("engine.steps:_call",),
    "effect.result": ("engine.steps:_conclude",),
    # The outbox.
    "outbox.enqueue": ("engine.transactions.jobs:enqueue",),
    "outbox.claim": (f"{_STORES}:claim", f"{_STORES}:turn"),
    "outbox.renew": (f"{_STORES}:renew_jobs",),
    "outbox.task": ("outbox.shift:Shift._result",),
    "outbox.note": (f"{_STORES}:note_provider",),
    "outbox.conclude": ("outbox.pump:Pump.conclude",),
    "outbox.settle": (f"{_STORES}:conclude", f"{_STORES}:turn"),
    # Upkeep.
    "upkeep.sweep": ("upkeep.sweeper:Sweeper.run",),
    "upkeep.reap": ("upkeep.reaper:Reaper.run",),
    "upkeep.ask": ("upkeep.reconciler:Reconciler._ask",),
    "upkeep.settle": ("engine.settlement:settle",),
    "upkeep.resume": ("upkeep.resumer:Resumer._resume",),
}
"""Name -> the functions of this point. ``stores.*`` is every store of the registry and its part for event loops,
``engine.transactions.adapters.*`` every driver's link: those that have the function. ``enlist.lock`` is every statement
of oncekey on the app's connection; the first one locks the key's row. ``outbox.settle`` writes how a job ended, and
settles its key."""


# -- actions -----------------------------------------------------------------------------------------------------------


def kill() -> None:
    """Die as by the kernel's OOM killer: the process flushes and closes nothing."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop as in a long pause of the machine: no thread runs until SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)  # the signal may reach another thread first, and this one must not go on before it stops


def raising(error: BaseException) -> Action:
    def fail() -> None:
        raise error

    return fail


# -- faults ------------------------------------------------------------------------------------------------------------


class Fault:
    """A fault at one point. It fires once, when the point is passed for the ``nth`` time; see :func:`install`."""

    def __init__(self, point: str, when: When, action: Action, nth: int) -> None:
        self.point = point
        self.when = when
        self.passed = 0
        """How often the point was passed so far."""
        self._action = action
        self._nth = nth
        self._lock = threading.Lock()  # several lanes call the store, each in its thread
        self._places: list[tuple[Any, str, Any]] = []

    @property
    def fired(self) -> bool:
        return self.passed >= self._nth

    def at(self, when: When) -> None:
        if when != self.when:
            return
        with self._lock:
            self.passed += 1
            now = self.passed == self._nth
        if now:
            self._action()

    def put(self, owner: Any, name: str) -> None:
        """Replace one function of a class or module."""
        self._places.append((owner, name, vars(owner)[name]))
        setattr(owner, name, _watched(vars(owner)[name], self))

    def remove(self) -> None:
        while self._places:
            owner, name, original = self._places.pop()
            setattr(owner, name, original)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def install(point: str, when: When, action: Action, nth: int = 1) -> Fault:
    """Run ``action`` when ``point`` is passed for the ``nth`` time. It stays until ``remove()`` or the end of ``with``.

    An action is :func:`kill`, :func:`stop`, :func:`raising` an error, or any function without arguments. It runs in the
    thread that passes the point, which may be a lane's or the driver's.
    """
    if point not in POINTS:
        raise LookupError(f"there is no point '{point}': there are {', '.join(POINTS)}")
    if when not in get_args(When):
        raise ValueError(f"a fault comes before or after its point, not '{when}'")
    fault = Fault(point, when, action, nth)
    for owner, name in places_of(point):
        fault.put(owner, name)
    if not fault._places:
        raise LookupError(f"point '{point}' is in modules whose drivers are not installed")
    return fault


def install_from_environment(environ: Mapping[str, str] = os.environ) -> Fault | None:
    """Install the fault that ``ONCEKEY_FAULT`` names: ``point:when:action`` or ``point:when:action:nth``. If it is not
    set, do nothing. Its actions are kill, stop and raise."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    point, when, action, nth = (*text.split(":"), "1")[:4]
    actions = {"kill": kill, "stop": stop, "raise": raising(RuntimeError(f"fault {text}"))}
    return install(point, when, actions[action], int(nth))  # type: ignore[arg-type]  # install() checks it


def places_of(point: str) -> list[tuple[Any, str]]:
    """The functions of a point: (class or module, name), for those whose drivers are installed. Each is there once."""
    places: dict[tuple[Any, str], None] = {}
    for target in POINTS[point]:
        module, _, path = target.partition(":")
        *outer, name = path.split(".")
        for owner in _owners(module):
            for part in outer:
                owner = getattr(owner, part)  # noqa: PLW2901 - the class inside of the module
            kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
            if kind := next((kind for kind in kinds if name in vars(kind)), None):
                places[kind, name] = None
            elif not module.endswith("*"):
                raise LookupError(f"point '{point}' has no function {target}")
    return list(places)


def _owners(module: str) -> list[Any]:
    if module == _STORES:
        packages = [found for entry in STORES if (found := _installed(entry.package)) is not None]
        in_loops = [importlib.import_module(f"{each.__name__}.in_loop") for each in packages if _has_in_loop(each)]
        return [kind for each in (*packages, *in_loops) for kind in _classes(each)]
    if module == _LINKS:
        files = dict.fromkeys(where.partition(":")[0] for where in ADAPTERS.values())
        modules = [_installed(f"{adapters.__name__}.{file}") for file in files]
        named = {where.partition(":")[2] for where in ADAPTERS.values()}
        return [kind for each in modules if each is not None for kind in _classes(each) if kind.__name__ in named]
    one = _installed(f"oncekey.{module}")
    return [] if one is None else [one]


def _installed(module: str) -> ModuleType | None:
    """The module; None if it needs a package that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("oncekey"):
            raise
        return None


def _has_in_loop(package: ModuleType) -> bool:
    return importlib.util.find_spec(f"{package.__name__}.in_loop") is not None


def _classes(module: ModuleType) -> list[type]:
    """The public classes of a module, and those that a store's package exports."""
    inside = (kind for kind in vars(module).values() if isinstance(kind, type))
    return [
        kind for kind in inside if kind.__module__.startswith(module.__name__) and not kind.__name__.startswith("_")
    ]


def _watched(original: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(original):

        @wraps(original)
        def flow(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            fault.at("before")
            result = yield from original(*args, **kwargs)
            fault.at("after")
            return result

        return flow
    if inspect.iscoroutinefunction(original):

        @wraps(original)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            fault.at("before")
            result = await original(*args, **kwargs)
            fault.at("after")
            return result

        return coroutine

    @wraps(original)
    def plain(*args: Any, **kwargs: Any) -> Any:
        fault.at("before")
        result = original(*args, **kwargs)
        if inspect.isgenerator(result):  # a plain function that returns a flow: its work ends with the flow
            return _to_its_end(result, fault)
        fault.at("after")
        return result

    return plain


def _to_its_end(flow: Generator[Any, Any, Any], fault: Fault) -> Generator[Any, Any, Any]:
    result = yield from flow
    fault.at("after")
    return result
