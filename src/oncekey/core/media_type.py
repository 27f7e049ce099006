"""A Content-Type in its normal form, and how the body of that type is read.

Type and subtype are in lower case, parameters sorted and unquoted. `charset=utf-8` is dropped for JSON, which is always
UTF-8; JSON and form text in another charset are RAW. For other types a charset changes the meaning of the bytes, so it
stays. The boundary is dropped if the parts are hashed.
"""

from __future__ import annotations

import re
from functools import lru_cache

from oncekey.core.multipart import is_boundary

__all__ = ["FIELDS", "JSON", "MULTIPART", "PAIRS", "RAW", "media_type", "read_media_type"]

RAW, JSON, FIELDS, MULTIPART, PAIRS = range(5)
"""How a body was read. These numbers are hashed: never change one."""

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ESSENCE = re.compile(rf"[ \t]*({_WORD}/{_WORD})").match
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*(?:({_WORD})=("(?:[^"\\]|\\.)*+"|{_WORD}))?', re.DOTALL).match
_UNQUOTE = re.compile(r"\\(.)", re.DOTALL)


def read_media_type(content_type: str | None) -> tuple[bytes, int, bytes]:
    """Return the normal form of a Content-Type without boundary, the form to try for the body, the boundary.

    A text that is not a media type, or names a parameter twice, is kept as it is, and its body is RAW: servers
    may read it in different ways.
    """
    if not content_type:
        return b"", RAW, b""
    as_it_is = content_type.encode("utf-8", "surrogatepass"), RAW, b""
    text = content_type.rstrip(" \t")
    found = _ESSENCE(text)
    if found is None:
        return as_it_is
    essence = found[1].lower()
    parameters: dict[str, str] = {}
    at = found.end()
    while at < len(text):
        parameter = _PARAMETER(text, at)
        if parameter is None:
            return as_it_is
        at = parameter.end()
        if parameter[1] is None:  # a stray semicolon
            continue
        name, value = parameter[1].lower(), parameter[2]
        if name in parameters:
            return as_it_is
        if value[0] == '"':
            value = _UNQUOTE.sub(r"\1", value[1:-1])
        parameters[name] = value.lower() if name == "charset" else value

    form, boundary = RAW, b""
    if essence == "application/json" or essence.endswith("+json"):
        if parameters.get("charset") in ("utf-8", "utf8"):
            del parameters["charset"]
        if "charset" not in parameters:
            form = JSON
    elif essence == "application/x-www-form-urlencoded":
        if parameters.get("charset", "utf-8") in ("utf-8", "utf8"):
            form = PAIRS
    elif essence == "multipart/form-data" and is_boundary(parameters.get("boundary", "")):
        form, boundary = MULTIPART, parameters.pop("boundary").encode()
    for name in sorted(parameters):
        quoted = parameters[name].replace("\\", "\\\\").replace('"', '\\"')
        essence += f';{name}="{quoted}"'
    return essence.encode("utf-8", "surrogatepass"), form, boundary


media_type = lru_cache(maxsize=256)(read_media_type)
"""``read_media_type`` with a cache: nearly all requests use a few spellings."""
