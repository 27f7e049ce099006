"""``oncekey keys new-key``: makes a key for the keyring."""

from __future__ import annotations

from typing import Annotated

import typer

from oncekey.cli.options import keyring
from oncekey.errors import ConfigurationError


def new_key(
    number: Annotated[
        int | None, typer.Argument(metavar="NUMBER", help="Its number, 1 to 120; default: the next one of the keyring.")
    ] = None,
) -> None:
    """Print a new key for ONCEKEY_KEYS, as NUMBER:KEY.

    The first key of the variable encrypts, and all of them decrypt. An app that runs already gets
    its first key with plain in front, plain,NUMBER:KEY, until every process has it. Keep a copy of
    it where your other secrets are: what was encrypted with a lost key cannot be read again.
    """
    from oncekey.encryption import keyring as keyrings

    there = keyring()
    ids = frozenset() if there is None else there.ids | there.lost
    chosen = max(ids, default=0) + 1 if number is None else number
    if chosen in ids:
        raise ConfigurationError(f"the keyring has a key {chosen} already: give another number")
    if not 1 <= chosen <= keyrings.MAX_ID:
        raise ConfigurationError(f"the numbers of keys are 1 to {keyrings.MAX_ID}")
    print(keyrings.new_key(chosen))
