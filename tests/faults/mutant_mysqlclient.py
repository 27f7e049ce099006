"""The guards of mysqlclient's connections, bare and in Django. See ``mutant_table.py``.

mysqlclient must be built from C, so it is not in requirements/dev.txt. Where it is not installed, these are left out.
"""

from __future__ import annotations

from tests.faults.mutant import Mutant, mutant

WATCH = "oncekey.engine.transactions.adapters.mysql_watch"
DJANGO = "oncekey.engine.transactions.adapters.django"
TESTS = "tests/enlist/test_django_mysql.py"


def _(guard: str, test: str, *edits: tuple[str, str, str]) -> Mutant:
    return mutant(31, "I1", guard, test, *edits, needs="MySQLdb")


MYSQLCLIENT: tuple[Mutant, ...] = (
    _(
        "commit() of mysqlclient beneath Django is refused",
        f"{TESTS}::test_end_beneath_django_is_refused[wsgi-own-blocks-commit-mysql-mysqlclient]",
        (WATCH, '_methods = ("query", "send_query", "commit", ', '_methods = ("query", "send_query", '),
    ),
    _(
        "a view that wrote on a session that mysqlclient opened again leaves its key unknown",
        f"{TESTS}::test_connection_that_the_library_replaced_makes_the_key_unknown[wsgi-own-blocks-mysql-mysqlclient]",
        (WATCH, "return self.holds() and bool(self._connection.thread_id() != self._session)", "return False"),
    ),
    _(
        "what a view wrote before it enlisted is undone with the rest (Django, mysqlclient)",
        "tests/enlist/test_django_misuse.py::test_write_before_enlist[wsgi-own-blocks-mysql-mysqlclient]",
        (DJANGO, "self._wrote = not self._opened_block and self._inner.ask_if_begun()", "self._wrote = False"),
    ),
    _(
        "the mark of an enlisted transaction is set again after the release of an older savepoint (mysqlclient)",
        "tests/enlist/test_django.py"
        "::test_enlisted_view_pays_once_and_replays[wsgi-atomic-requests-pay_in_block-mysql-mysqlclient]",
        (DJANGO, "            if released in older:\n", "            if False:\n"),
    ),
)
