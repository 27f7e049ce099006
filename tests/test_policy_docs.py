"""docs/policy.md has every option of Policy, with its default and the sentences that stand beside the field.

``ONCEKEY_WRITE_DOCS=1 pytest tests/test_policy_docs.py`` writes them into the page.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from oncekey import OnceKey, Policy

PAGE = Path(__file__).parent.parent / "docs/policy.md"
OPTIONS = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- /options -->\n)", re.DOTALL)
HEAD = re.compile(r"(?P<name>\w+): .+? = (?P<default>.+)")


def shown(value: Any) -> str:
    """A default that the source only names, such as STORED_HEADERS."""
    names = sorted(value) if isinstance(value, frozenset) else value
    return ", ".join(f"`{name}`" for name in names)


def choices(kind: Any, default: Any) -> str:
    """The other values that a field takes, where they can be counted."""
    literals = [kind, *get_args(kind)]
    named = [each for literal in literals if get_origin(literal) is Literal for each in get_args(literal)]
    others = ", ".join(f'`"{each}"`' for each in named if each != default)
    return f" (or {others})" if others else ""


def rows() -> list[str]:
    """One row of the table for each paragraph of ``help(Policy)``."""
    kinds, policy = get_type_hints(Policy), Policy()
    made = []
    for paragraph in (Policy.__doc__ or "").split("\n\n")[1:]:
        head, *lines = paragraph.splitlines()
        option = HEAD.fullmatch(head)
        assert option is not None, head
        name, source, value = option["name"], option["default"], getattr(policy, option["name"])
        default = shown(value) if source.isupper() else f"`{source.replace(chr(39), chr(34))}`"
        reason = " ".join(line.strip() for line in lines).replace("``", "`")
        made.append(f"| `{name}` | {default}{choices(kinds[name], value)} | {reason} |")
    return made


def test_the_page_has_every_option_as_the_source_has_it() -> None:
    text = PAGE.read_text("utf-8")
    table = "\n".join(["| option | default | what it does, and why |", "|---|---|---|", *rows(), ""])
    if os.environ.get("ONCEKEY_WRITE_DOCS"):
        PAGE.write_text(OPTIONS.sub(lambda _: table, text), encoding="utf-8")
    assert OPTIONS.findall(PAGE.read_text("utf-8")) == [table]


def test_every_field_that_can_be_given_has_a_row() -> None:
    """A field without a sentence beside it would be missing from ``help(Policy)``, and from the page."""
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert named == [field.name for field in fields(Policy) if field.init]


def test_route_policy_replaces_the_policy_of_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the page."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/policy.md", "exec"), names)
    once: OnceKey = names["once"]
    assert [route and route.policy.lease.total_seconds() for route in map(once.routes.match, *POSTS)] == [15, 60, None]
    once.close()


POSTS = (["POST"] * 3, ["/orders", "/charges", "/login"])
