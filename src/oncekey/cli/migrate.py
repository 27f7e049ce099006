"""``oncekey migrate``: bring a store's tables to this version."""

from __future__ import annotations

import typer

from oncekey.cli.options import AsJson, StoreUrl, named, opened, print_json


def register(app: typer.Typer) -> None:
    app.command("migrate")(migrate)


def migrate(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Create or upgrade the tables of a store.

    Safe to run twice, and from several deploys at once. SQLite upgrades itself when it is opened.
    """
    with opened(store) as target:
        ran = target.migrate()
    if as_json:
        print_json({"store": named(store), "ran": ran})
    elif ran:
        print(f"{named(store)}: ran {', '.join(ran)}")
    else:
        print(f"{named(store)}: up to date")
