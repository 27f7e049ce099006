"""Values that JSON does not have, in JSON: for the arguments of a call, which are compared, and for its result.

A value has a form of one member, whose name begins with ``$``::

    Decimal("1.10")                 {"$decimal": "1.10"}
    UUID("…")                       {"$uuid": "…"}
    datetime, date, time            {"$datetime": "2026-11-17T22:10:00+00:00"}, {"$date": …}, {"$time": …}
    timedelta                       {"$timedelta": [days, seconds, microseconds]}
    b"…"                            {"$bytes": base64}
    {1: "a", "1": "b"}              {"$dict": [[1, "a"], ["1", "b"]]}, if a name is not a str
    {"$decimal": "1.10"}, a dict    {"$": {"$decimal": "1.10"}}

So two different values never have the same form, and ``restored`` gives back what ``plain`` was given. These lose their
type: an Enum counts as its value, a tuple as a list.
"""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

_AS_IT_IS: Final = "$"
_RESTORE: Final[dict[str, Callable[[Any], Any]]] = {
    "$decimal": Decimal,
    "$uuid": UUID,
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dict": lambda items: {restored(name): restored(each) for name, each in items},
}


def plain(value: Any, other: Callable[[Any], Any] | None = None, *, text_names: bool = False) -> Any:
    """The value as JSON has it. TypeError and ValueError say what has no form; ``other`` may give it one.

    ``text_names``: the names in a dict must be texts.
    """
    match value:
        case Enum():
            return plain(value.value, other, text_names=text_names)
        case None | bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a number that JSON has")
            return value
        case list() | tuple():
            return [plain(each, other, text_names=text_names) for each in value]
        case dict():
            if not all(isinstance(name, str) for name in value):
                if text_names:
                    raise TypeError("a dict has a name that is not a str")
                return {"$dict": _items(value, other)}
            members = {name: plain(each, other, text_names=text_names) for name, each in value.items()}
            return {_AS_IT_IS: members} if _has_a_mark(members) else members
        case Decimal():
            return {"$decimal": str(value)}
        case UUID():
            return {"$uuid": str(value)}
        case datetime.datetime():  # before date: a datetime is one
            return {"$datetime": value.isoformat()}
        case datetime.date():
            return {"$date": value.isoformat()}
        case datetime.time():
            return {"$time": value.isoformat()}
        case datetime.timedelta():
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
    if other is not None:
        return other(value)
    raise no_form(value)


def _items(value: dict[Any, Any], other: Callable[[Any], Any] | None) -> list[list[Any]]:
    """The members of a dict. JSON would write the name 1 as "1", and two members could become one."""
    items = [[plain(name, other), plain(each, other)] for name, each in value.items()]
    if len({repr(name) for name, _ in items}) < len(items):
        raise ValueError("two names of a dict have one form in JSON")
    return items


def restored(read: Any) -> Any:
    """The value whose form was read from JSON."""
    match read:
        case list():
            return [restored(each) for each in read]
        case dict():
            if not _has_a_mark(read):
                return {name: restored(each) for name, each in read.items()}
            ((mark, form),) = read.items()
            if mark == _AS_IT_IS and isinstance(form, dict):
                return {name: restored(each) for name, each in form.items()}
            return _RESTORE[mark](form) if mark in _RESTORE else read
    return read


def no_form(value: Any) -> TypeError:
    return TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no form in JSON")


def _has_a_mark(members: dict[Any, Any]) -> bool:
    if len(members) != 1:
        return False
    (name,) = members
    return isinstance(name, str) and name.startswith("$")
