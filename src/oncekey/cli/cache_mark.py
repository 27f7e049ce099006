"""What ``oncekey keys forget`` says about the cache in front of the store: where the mark is, and what it replaced."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from oncekey.cli.options import named

NAME_THE_CACHE = (
    "if the app has cache=, it may replay the answer for up to its cache_ttl: run this again with --cache URL"
)
CacheUrl = Annotated[
    str, typer.Option("--cache", envvar="ONCEKEY_CACHE", metavar="URL", help="The cache in front of the store, if any.")
]


def cache_words(cache: str, *, had_answer: bool) -> str:
    """A cache without an answer is usual: entries live for a minute. It may also be the wrong one."""
    if had_answer:
        return f"the cache at {named(cache)} had an answer to this key, and has a mark in its place"
    return (
        f"the cache at {named(cache)} had no answer to this key, and has a mark for a minute. If the app's cache= "
        "names another server or database number, it may still replay the answer: run this again with that URL"
    )


def cache_json(cache: str, *, had_answer: bool) -> dict[str, Any]:
    return {"cache": {"at": named(cache), "had_answer": had_answer}}
