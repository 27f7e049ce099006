"""``oncekey migrate``: bring a store's tables to this version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from oncekey.admin.encryption import keyring_of, plain_reason_refused
from oncekey.cli.options import AsJson, StoreUrl, named, opened, print_json
from oncekey.cli.prompts import Who, Why, Yes, sure
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Epochs, Store

_LOSS = [
    "Keys that this store has lost will look new: a client that retries one of them runs its operation a second time.",
    "Restore the data instead, if there is a copy. After this, restart all processes of the app.",
]

_PLAIN = "No keyring is given, so the reason is kept as plain text. If the app encrypts, stop, and set ONCEKEY_KEYS."


def register(app: typer.Typer) -> None:
    app.command("migrate")(migrate)


def migrate(
    store: StoreUrl = "",
    as_json: AsJson = False,
    init: Annotated[
        bool, typer.Option("--init", help="Set up a store that is new and empty; other stores need no --init.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on with a store that has lost its keys; written to the audit.")
    ] = False,
    yes: Yes = False,
    who: Who = None,
    why: Why = None,
) -> None:
    """Create or upgrade the tables of a store.

    Safe to run twice, and from several deploys at once. SQLite upgrades itself when it is opened.
    """
    with opened(store) as target:
        epoch = _epoch(target, init=init, accept_loss=accept_loss, yes=yes, who=who, why=why)
        ran = target.migrate()
    if as_json:
        print_json({"store": named(store), "ran": ran} | ({"epoch": epoch} if epoch else {}))
    else:
        for line in _told(named(store), ran, epoch, accept_loss=accept_loss):
            print(line)


def _told(name: str, ran: Sequence[str], epoch: str | None, *, accept_loss: bool) -> Iterator[str]:
    if ran:
        yield f"{name}: ran {', '.join(ran)}"
    if epoch is None:
        if not ran:
            yield f"{name}: up to date"
        return
    if accept_loss:
        yield f"{name}: has a new epoch, {epoch}; the loss is in the audit"
        yield "restart all processes of the app: each keeps the epoch that it read at its start or first request"
    else:
        yield f"{name}: is set up, with epoch {epoch}"
        yield "if this store had keys before, they look new now, and their retries run again"
    yield f"with ?epoch={epoch} in the URL the app takes no other"


def _epoch(target: Store, *, init: bool, accept_loss: bool, yes: bool, who: str | None, why: str | None) -> str | None:
    if accept_loss:
        if not isinstance(target, Epochs):
            raise ConfigurationError("--accept-loss: this store has no epoch, so there is no loss to accept")
        if (refusal := plain_reason_refused(target)) is not None:
            raise refusal
        lines = _LOSS if keyring_of(target) is not None else [*_LOSS, _PLAIN]
        return target.accept_loss(sure(lines, yes=yes, who=who, why=why))
    return target.init() if init and isinstance(target, Epochs) else None
