"""What docs/encryption.md says about plain text that stays in a database's files after ``re-encrypt``."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.stores.registry import open_store
from tests.encryption import dumps
from tests.encryption.kept_rows import SECRET, put, put_job
from tests.encryption.rings import ring

PAGE = (Path(__file__).parents[2] / "docs/encryption.md").read_text("utf-8")


def test_command_of_the_page_removes_old_text_from_the_files_of_sqlite(tmp_path: Path) -> None:
    found = re.search(r'`sqlite3 app\.db "([^"]+)"`', PAGE)
    assert found is not None
    path = tmp_path / "app.db"
    url = f"sqlite:///{path}"
    store = open_store(url)
    for number in range(50):
        put(store, f"plain-{number}")
    put_job(store, url, "plain", None)
    Rotation(raw_values(store), ring(1), trust_key=True).run(lambda report: None)
    assert SECRET.encode() in dumps.of_sqlite(path)

    with closing(sqlite3.connect(path)) as own:
        own.executescript(found[1])
    assert SECRET.encode() not in dumps.of_sqlite(path)
    store.close()
