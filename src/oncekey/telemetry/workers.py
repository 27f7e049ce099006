"""How many worker processes the server was told to start, as far as its command line says so.

A worker process cannot see its siblings. But gunicorn forks its workers, and uvicorn hands them its own ``sys.argv``:
both have the command line of the server. A number in a configuration file is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

_SERVERS = frozenset({"gunicorn", "uvicorn", "hypercorn", "granian", "fastapi"})
_READ_ENVIRONMENT = frozenset({"gunicorn", "uvicorn", "fastapi"})
"""The servers whose default number of workers is WEB_CONCURRENCY."""
_NUMBER = re.compile(r"(?:-w|--workers)(?:[= ]| *(?=\d))(\d+)")


def workers_asked(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """The server and the number of its workers. The number is 1 if this is not one of the known servers, or if the
    command line and the environment do not say it."""
    if not argv:
        return "", 1
    program = PurePath(argv[0])
    server = program.parent.name if program.stem == "__main__" else program.stem  # python -m uvicorn
    if server not in _SERVERS:
        return "", 1
    by_environment = environ.get("GUNICORN_CMD_ARGS", "").split() if server == "gunicorn" else []
    for words in (argv[1:], by_environment):
        said = [found[1] for at in range(len(words)) if (found := _NUMBER.fullmatch(" ".join(words[at : at + 2])))]
        said += [found[1] for word in words if (found := _NUMBER.fullmatch(word))]
        if said:
            return server, int(said[-1])
    default = environ.get("WEB_CONCURRENCY", "") if server in _READ_ENVIRONMENT else ""
    return server, int(default) if default.isdigit() else 1
