"""What stands in a WSGI environ, as ``scopes.py`` has it for ASGI, and WSGI's form of a status."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

Environ = dict[str, Any]

_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def method_of(environ: Environ) -> str:
    """In capitals, as Werkzeug reads it: what it routes as a POST is one."""
    method: str = environ["REQUEST_METHOD"]
    return method.upper()


def path_of(environ: Environ) -> str:
    return decoded(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")) or "/"


def decoded(path: str) -> str:
    """A path as the client sent it, decoded: WSGI hands UTF-8 over in the clothes of latin-1. Two never become one."""
    return path.encode("latin-1").decode("utf-8", "surrogateescape")


def all_headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """As ASGI has them: WSGI servers make one line of several, and put two of them under names of their own."""
    named = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    return [
        (name.replace("_", "-").lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in named.items()
    ]


def header_lines(environ: Environ, names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The lines of the headers of these names, which are in lower case; WSGI servers make one of several."""
    found = ((name, environ.get("HTTP_" + name.decode().upper().replace("-", "_"))) for name in names)
    return [(name, line.encode("latin-1")) for name, line in found if line is not None]


def status_line(status: int) -> str:
    return f"{status} {_PHRASES.get(status, 'Status')}"
