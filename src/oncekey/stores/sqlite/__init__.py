"""The embedded default store: one file, nothing to install. See ``store.py``."""

from urllib.parse import unquote

from oncekey.errors import ConfigurationError
from oncekey.stores.sqlite.store import WRITERS, SqliteStore

__all__ = ["SqliteStore", "from_url"]

_WRITERS = {f"writer={name}": name for name in WRITERS}


def from_url(url: str) -> SqliteStore:
    """As in SQLAlchemy: three slashes before a relative path, four before an absolute one."""
    path, mark, options = url.removeprefix("sqlite://").removeprefix("/").partition("?")
    chosen = _WRITERS.get(options) if mark else "thread"
    if chosen is None or "#" in path:
        raise ConfigurationError(
            "the SQLite URL takes one option, writer: use sqlite:///file.db or sqlite:///file.db?writer=process "
            "(%3F and %23 for '?' and '#' in a file's name)"
        )
    if not path:
        raise ConfigurationError("the SQLite URL names no file: use sqlite:///file.db, or memory:// to keep nothing")
    return SqliteStore(unquote(path), writer=chosen)
