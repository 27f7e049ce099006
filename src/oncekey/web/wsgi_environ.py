"""Reads WSGI environs, as ``asgi_scope.py`` reads ASGI scopes, and writes WSGI's status line."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

Environ = dict[str, Any]

_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def method_of(environ: Environ) -> str:
    """The method in capitals, as Werkzeug reads it: it routes ``post`` as POST."""
    method: str = environ["REQUEST_METHOD"]
    return method.upper()


def path_of(environ: Environ) -> str:
    return decoded(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")) or "/"


def decoded(path: str) -> str:
    """The decoded path. WSGI passes UTF-8 decoded as latin-1. Distinct paths stay distinct."""
    return path.encode("latin-1").decode("utf-8", "surrogateescape")


def all_headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """The headers in ASGI's form. WSGI servers join several lines of a header into one, and give two headers names
    without ``HTTP_``."""
    named = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    return [
        (name.replace("_", "-").lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in named.items()
    ]


def header_lines(environ: Environ, names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The lines of the headers with these names (in lower case). WSGI servers join several lines of one header."""
    found = ((name, environ.get("HTTP_" + name.decode().upper().replace("-", "_"))) for name in names)
    return [(name, line.encode("latin-1")) for name, line in found if line is not None]


def status_line(status: int) -> str:
    return f"{status} {_PHRASES.get(status, 'Status')}"
