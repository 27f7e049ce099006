"""PostgreSQL arrays in the binary format, built with as few Python steps per element as it takes.

A batch is one statement over arrays, one array per column. psycopg's own list adaptation looks up a dumper per
element and lets the array's type depend on its contents (all None: unknown), which would prepare the same statement
several times; here the type is fixed by the column and an element costs about 0.2 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, pack
from typing import Any, ClassVar

from psycopg import pq
from psycopg.adapt import AdaptersMap, Dumper

_FROM_ONE = pack(">i", 1)  # the lower bound, which ends an array's head
_NULL = pack(">i", -1)
_pack_int, _pack_float = Struct(">ii").pack, Struct(">id").pack


@lru_cache(maxsize=1024)
def _length(number: int) -> bytes:
    """Remembered, since few numbers make nearly all lengths."""
    return number.to_bytes(4, "big")


class Column:
    """One array parameter: the values of one column of a batch."""

    __slots__ = ("values",)
    array_oid: ClassVar[int]
    _start: ClassVar[bytes]

    def __init_subclass__(cls, element_oid: int, array_oid: int) -> None:
        cls.array_oid = array_oid
        cls._start = pack(">iiI", 1, 1, element_oid)  # dimensions, has nulls, type of the elements

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def encode(self) -> bytes:
        values = self.values
        length = len(values)
        header = self._start + _length(length) + _FROM_ONE
        first = values[0] if length else None
        if values.count(first) == length:  # most columns of a batch say the same in every row
            return header + (_NULL if first is None else self.element(first)) * length
        return header + self.elements()

    def elements(self) -> bytes:
        """All of them, one behind the other."""
        return b"".join([_NULL if value is None else self.element(value) for value in self.values])

    @staticmethod
    def element(value: Any) -> bytes:
        raise NotImplementedError  # pragma: no cover


def _joined(values: Sequence[bytes]) -> bytes:
    """Each behind its length. Most columns have values of one length (UUIDs, hashes): then no step for each of them."""
    lengths = set(map(len, values))
    if len(lengths) == 1:
        before = _length(lengths.pop())
        return before + before.join(values)
    return b"".join([_length(len(value)) + value for value in values])


class Text(Column, element_oid=25, array_oid=1009):
    __slots__ = ()

    def elements(self) -> bytes:
        return super().elements() if None in self.values else _joined([*map(str.encode, self.values)])

    @staticmethod
    def element(value: str) -> bytes:
        data = value.encode()
        return _length(len(data)) + data


class Bytea(Column, element_oid=17, array_oid=1001):
    __slots__ = ()

    def elements(self) -> bytes:
        return super().elements() if None in self.values else _joined(self.values)

    @staticmethod
    def element(value: bytes) -> bytes:
        return _length(len(value)) + value


class Float8(Column, element_oid=701, array_oid=1022):
    __slots__ = ()

    @staticmethod
    def element(value: float) -> bytes:
        return _pack_float(8, value)


class Int4(Column, element_oid=23, array_oid=1007):
    __slots__ = ()

    @staticmethod
    def element(value: int) -> bytes:
        return _pack_int(4, value)


class Bool(Column, element_oid=16, array_oid=1000):
    __slots__ = ()

    @staticmethod
    def element(value: bool) -> bytes:
        return b"\x00\x00\x00\x01\x01" if value else b"\x00\x00\x00\x01\x00"


class _ColumnDumper(Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Column) -> bytes:
        return obj.encode()


def register(adapters: AdaptersMap) -> None:
    """Teach a connection to send columns."""
    for kind in (Text, Bytea, Float8, Int4, Bool):
        dumper = type(f"{kind.__name__}Dumper", (_ColumnDumper,), {"oid": kind.array_oid})
        adapters.register_dumper(kind, dumper)
