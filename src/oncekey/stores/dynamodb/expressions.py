"""Builds the expressions of one write: what it sets, removes and compares.

Every name and value gets a placeholder, because DynamoDB reserves hundreds of words (``state``, ``key``, ``owner``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Item = dict[str, Any]


class Expressions:
    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: Item = {}
        self._sets: list[str] = []
        self._removes: list[str] = []
        self._conditions: list[str] = []

    def name(self, *path: str | int) -> str:
        """A placeholder for an attribute, or for what is inside of one: names of maps, numbers of lists."""
        said = ""
        for part in path:
            if isinstance(part, int):
                said += f"[{part}]"
                continue
            placeholder = self._names.setdefault(part, f"#n{len(self._names)}")
            said += f".{placeholder}" if said else placeholder
        return said

    def value(self, value: Item) -> str:
        placeholder = f":v{len(self._values)}"
        self._values[placeholder] = value
        return placeholder

    def set(self, path: str | tuple[str | int, ...], value: Item) -> None:
        self.set_to(path, self.value(value))

    def set_to(self, path: str | tuple[str | int, ...], expression: str) -> None:
        names = (path,) if isinstance(path, str) else path
        self._sets.append(f"{self.name(*names)} = {expression}")

    def set_once(self, path: tuple[str, ...], otherwise: str) -> None:
        """Keep what is there; set it to ``otherwise`` where nothing is."""
        self.set_to(path, f"if_not_exists({self.name(*path)}, {otherwise})")

    def remove(self, names: Iterable[str | tuple[str | int, ...]]) -> None:
        self._removes += [self.name(*((name,) if isinstance(name, str) else name)) for name in names]

    def where(self, path: str | tuple[str | int, ...], comparison: str, value: Item) -> None:
        names = (path,) if isinstance(path, str) else path
        self._conditions.append(f"{self.name(*names)} {comparison} {self.value(value)}")

    def where_there(self, name: str, *, there: bool = True) -> None:
        self._conditions.append(f"attribute_{'exists' if there else 'not_exists'}({self.name(name)})")

    def where_either(self, *conditions: str) -> None:
        self._conditions.append(f"({' OR '.join(conditions)})")

    def update(self) -> Item:
        """For ``update_item``."""
        parts = [f"SET {', '.join(self._sets)}"] if self._sets else []
        parts += [f"REMOVE {', '.join(self._removes)}"] if self._removes else []
        return {"UpdateExpression": " ".join(parts), **self.condition()}

    def condition(self) -> Item:
        """For ``delete_item``."""
        request: Item = {"ConditionExpression": " AND ".join(self._conditions)}
        if self._names:
            request["ExpressionAttributeNames"] = {placeholder: name for name, placeholder in self._names.items()}
        if self._values:
            request["ExpressionAttributeValues"] = self._values
        return request
