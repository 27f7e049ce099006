"""``manage.py oncekey …``: the command line of oncekey, with the store of the setting ``ONCEKEY``."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from oncekey.web.django import conf

WSGI = "oncekey.web.django.project:application"
"""What ``oncekey routes`` gets if no app is named."""


class Command(BaseCommand):
    help = "Runs oncekey's command line with the store of the setting ONCEKEY: manage.py oncekey keys list"
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django declares it

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass all arguments on: ``--help`` and ``--json`` are oncekey's."""
        try:
            self.execute(arguments=argv[2:])
        except CommandError as error:
            self.stderr.write(f"oncekey: {error}")
            sys.exit(1)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("arguments", nargs="*")

    def execute(self, *args: Any, **options: Any) -> None:
        self.handle(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        arguments = [*args, *options.get("arguments", ())]
        try:
            url = conf.store_url(conf.read().get("STORE"))
        except conf.Wrong as wrong:
            raise CommandError(str(wrong)) from wrong
        if arguments[:1] == ["routes"] and all(str(each).startswith("-") for each in arguments[1:]):
            arguments.append(WSGI)
        # By name: the command line is a floor above the web modules, and is imported only by this command.
        main = import_module("oncekey.cli").main
        before, given = sys.argv, os.environ.get("ONCEKEY_STORE")
        sys.argv = ["oncekey", *map(str, arguments)]
        os.environ["ONCEKEY_STORE"] = url
        try:
            main()
        finally:
            sys.argv = before
            if given is None:
                del os.environ["ONCEKEY_STORE"]
            else:
                os.environ["ONCEKEY_STORE"] = given
