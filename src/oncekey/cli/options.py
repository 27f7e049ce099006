"""What commands share: the option for the store, its name in messages, and JSON output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store, Transactions
from oncekey.stores.registry import KNOWN, open_store

StoreUrl = Annotated[
    str, typer.Option("--store", envvar="ONCEKEY_STORE", metavar="URL", help=f"Where keys are kept: {KNOWN}.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store of this URL; it is closed at the end."""
    if not url:
        raise ConfigurationError(f"no store is given: use --store URL or ONCEKEY_STORE with one of {KNOWN}")
    store = open_store(url)
    try:
        yield store
    finally:
        store.disconnect()
        store.close()


@contextmanager
def existing(url: str) -> Iterator[Store]:
    """As ``opened``, for commands other than ``migrate``: a database file that does not exist is not created.

    An empty file would tell the operator that there are no keys, and a worker that there are no jobs.
    """
    with opened(url) as store:
        path = store.file if isinstance(store, Transactions) else None
        if path is not None and not path.exists():
            raise ConfigurationError(
                f"there is no file {path}: give the --store URL that the app uses, "
                "or create the file with `oncekey migrate`"
            )
        yield store


def named(url: str) -> str:
    """A store's URL for messages: without the password, and without the query, which may contain one."""
    parts = urlsplit(url)
    who, at, where = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{who.partition(':')[0]}{at}{where}{parts.path}"


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
