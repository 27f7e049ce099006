"""The server-side scripts: one .lua file per verb, with the library files that its first line names before it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files

_FOLDER = files("oncekey.stores.redis") / "lua"


@dataclass(frozen=True)
class Script:
    name: str
    text: bytes
    sha: bytes


def script(name: str) -> Script:
    text = (_FOLDER / f"{name}.lua").read_text("utf-8")
    first, _, _ = text.partition("\n")
    libraries = first.removeprefix("-- #include ").split()
    parts = [(_FOLDER / "lib" / f"{library}.lua").read_text("utf-8") for library in libraries]
    whole = "".join([*parts, text]).encode()
    return Script(name, whole, sha1(whole, usedforsecurity=False).hexdigest().encode())


RESERVE = script("reserve")
END = script("end")
SWAP = script("swap")
READ = script("read")
SLIM = script("slim")
STEPS = script("steps")
FIND = script("find")
DUE = script("due")
SCOPES = script("scopes")
REMOVE = script("remove")
LISTING = script("listing")
SHELF = script("shelf")
COUNTS = script("counts")
AUDIT = script("audit")
AUDIT_DUE = script("audit_due")
AUDIT_PURGE = script("audit_purge")
NOTE = script("note")
KEPT_ROWS = script("kept_rows")
KEPT_LINES = script("kept_lines")
REWRITE_ROWS = script("rewrite_rows")
REWRITE_STEPS = script("rewrite_steps")
REWRITE_LINES = script("rewrite_lines")
