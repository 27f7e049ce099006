"""Builds PostgreSQL arrays in the binary format, with few Python steps per element.

A batch is one statement over arrays, one array per column. psycopg's own list adaptation looks up a dumper per
element, and the contents decide the array's type (all None: unknown), so the same statement is prepared several
times. Here the column fixes the type, and an element costs about 0.2 µs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from struct import Struct, pack
from typing import Any, ClassVar

from psycopg import pq
from psycopg.adapt import AdaptersMap, Dumper

_HEADER = Struct(">iiIii")  # dimensions, has nulls, element type, length, lower bound
_NULL = b"\xff\xff\xff\xff"


class Column(ABC):
    """One array parameter: the values of one column of a batch."""

    __slots__ = ("values",)
    element_oid: ClassVar[int]
    array_oid: ClassVar[int]

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def encode(self) -> bytes:
        values = self.values
        length = len(values)
        header = self.header(length)
        first = values[0] if length else None
        if values.count(first) == length:  # most columns of a batch say the same in every row
            return header + (_NULL if first is None else self.element(first)) * length
        return header + self.elements()

    @classmethod
    def header(cls, length: int) -> bytes:
        return _HEADER.pack(1, 1, cls.element_oid, length, 1)

    def elements(self) -> bytes:
        """All elements, concatenated."""
        return b"".join([_NULL if value is None else self.element(value) for value in self.values])

    @staticmethod
    @abstractmethod
    def element(value: Any) -> bytes:
        """One element after its length."""


def joined(values: Sequence[bytes]) -> bytes:
    """Each value after its length. Most columns have values of one length (UUIDs, hashes): one ``join`` does them."""
    lengths = set(map(len, values))
    if len(lengths) == 1:
        before = lengths.pop().to_bytes(4, "big")
        return before + before.join(values)
    return b"".join([len(value).to_bytes(4, "big") + value for value in values])


class Text(Column):
    __slots__ = ()
    element_oid, array_oid = 25, 1009

    def elements(self) -> bytes:
        return super().elements() if None in self.values else joined([value.encode() for value in self.values])

    @staticmethod
    def element(value: str) -> bytes:
        data = value.encode()
        return len(data).to_bytes(4, "big") + data


class Bytea(Column):
    __slots__ = ()
    element_oid, array_oid = 17, 1001

    def elements(self) -> bytes:
        return super().elements() if None in self.values else joined(self.values)

    @staticmethod
    def element(value: bytes) -> bytes:
        return len(value).to_bytes(4, "big") + value


class Float8(Column):
    __slots__ = ()
    element_oid, array_oid = 701, 1022

    @staticmethod
    def element(value: float) -> bytes:
        return pack(">id", 8, value)


class Int4(Column):
    __slots__ = ()
    element_oid, array_oid = 23, 1007

    @staticmethod
    def element(value: int) -> bytes:
        return pack(">ii", 4, value)


class Bool(Column):
    __slots__ = ()
    element_oid, array_oid = 16, 1000

    @staticmethod
    def element(value: bool) -> bytes:
        return b"\x00\x00\x00\x01\x01" if value else b"\x00\x00\x00\x01\x00"


class _ColumnDumper(Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Column) -> bytes:
        return obj.encode()


def register(adapters: AdaptersMap) -> None:
    """Let a connection send ``Column`` parameters."""
    for kind in (Text, Bytea, Float8, Int4, Bool):
        dumper = type(f"{kind.__name__}Dumper", (_ColumnDumper,), {"oid": kind.array_oid})
        adapters.register_dumper(kind, dumper)
