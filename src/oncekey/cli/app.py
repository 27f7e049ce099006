"""The typer app: what all commands share, and the list of them.

A group of commands is a module with ``register(app)``; add a new one to ``_GROUPS``. A command raises errors of
``oncekey.errors``, and ``oncekey.cli.app`` turns them into a sentence and an exit code.
"""

from __future__ import annotations

from typing import Annotated

import typer

from oncekey.cli import (
    client,
    dead_letters,
    demo,
    doctor,
    keys,
    ledger,
    metrics,
    migrate,
    options,
    print_version,
    routes,
    send,
    upkeep,
    worker,
)
from oncekey.cli.options import KeysEnv

_GROUPS = (demo, migrate, worker, upkeep, keys, dead_letters, doctor, ledger, routes, metrics, send, client)

app = typer.Typer(
    help="Idempotency for HTTP APIs: a retried request runs once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - its callback has shown it
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    keys_env: KeysEnv = None,
) -> None:
    """Options of ``oncekey`` itself. (Without a callback, typer drops the command's name if there is only one.)"""
    options.keys_env.set(keys_env)


for _group in _GROUPS:
    _group.register(app)
