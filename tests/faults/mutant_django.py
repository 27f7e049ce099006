"""The guards of Django's views and connections. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

REPORTS, CALLS, MESSAGES = "oncekey.web.django.reports", "oncekey.web.django.calls", "oncekey.web.django.messages"
MIDDLEWARE, LINK = "oncekey.web.django.middleware", "oncekey.engine.transactions.adapters.django"
REST = "tests/enlist/test_django_rest.py"
MISUSE = "tests/enlist/test_django_misuse.py"
TESTS, CONNECTIONS = "tests/web/test_django_middleware.py", "tests/enlist/test_django_connections.py"
ENTERED = f"{TESTS}::test_view_that_middleware_calls_is_entered"

DJANGO: tuple[Mutant, ...] = (
    _(
        34,
        "I1",
        "a second middleware of Django has no effect",
        f"{TESTS}::test_second_middleware_has_no_effect[wsgi-function-external]",
        (MIDDLEWARE, "        if passed_us(request):  #", "        if False:  #"),
    ),
    _(
        34,
        "I1",
        "Django's middleware has no effect inside of a middleware around Django",
        f"{TESTS}::test_middleware_around_django_keeps_its_operation",
        (MESSAGES, "    return ENVIRON_KEY in request.META or", "    return"),
    ),
    _(
        34,
        "I1",
        "a request that Django's outer middleware sends twice runs once",
        f"{TESTS}::test_request_that_outer_middleware_sends_twice_runs_once[wsgi]",
        (MESSAGES, "return bool(call.inside)", "return True"),
    ),
    _(
        34,
        "I1",
        "a view of Django that other middleware calls reports",
        f"{ENTERED}[wsgi-CallsView-inside-function-external]",
        (REPORTS, "            match.func = reported(match.func)\n", "            pass\n"),
    ),
    _(
        34,
        "I1",
        "middleware of Django cannot unwrap the report",
        f"{ENTERED}[wsgi-CallsInnermost-inside-function-external]",
        (REPORTS, '        self.__dict__.pop("__wrapped__", None)\n', ""),
    ),
    _(
        34,
        "I1",
        "a view of Django reports from a thread of middleware",
        f"{ENTERED}[wsgi-InThread-inside-function-external]",
        (REPORTS, "    if call is not None:\n        return call.enter_view()\n", ""),
    ),
    _(
        34,
        "I1",
        "a view of Django is not called after its request was answered",
        f"{TESTS}::test_view_that_a_thread_enters_after_the_answer_is_not_called[wsgi]",
        (CALLS, "        if self.inside:\n            return operation\n", "        return operation\n"),
    ),
    _(
        34,
        "I1",
        "views of Django report beside a tool that wraps the same method",
        f"{TESTS}::test_views_report_if_another_tool_has_wrapped_django_first",
        (
            REPORTS,
            "if hasattr(BaseHandler.make_view_atomic, _INSTALLED):",
            'if hasattr(BaseHandler.make_view_atomic, "__wrapped__"):',
        ),
    ),
    _(
        31,
        "I1",
        "no success is sent if the enlisted connection of Django was taken out",
        f"{CONNECTIONS}::test_connection_taken_out_makes_the_key_unknown[wsgi-own-blocks-201-postgresql]",
        (
            LINK,
            "self._wrapper.connection is not self._raw or self._taken_out",
            "self._wrapper.connection is not self._raw",
        ),
    ),
    _(
        31,
        "I4",
        "a connection of Django that was taken out is closed",
        f"{CONNECTIONS}::test_connection_taken_out_is_closed[wsgi-own-blocks-postgresql]",
        (LINK, "                self._raw.close()  # nothing", "                pass  # nothing"),
    ),
    _(
        31,
        "I1",
        "Django's connection is enlisted in the thread of the request only",
        f"{CONNECTIONS}::test_enlist_in_another_thread_is_refused[wsgi-own-blocks-postgresql]",
        (LINK, "if ends_elsewhere and not (self.ends_here or thread_of_request())():", "if False:"),
    ),
    _(
        31,
        "I1",
        "a block of another database is refused, also with ATOMIC_REQUESTS",
        f"{CONNECTIONS}::test_block_of_another_database_is_refused[wsgi-atomic-requests-postgresql]",
        (f"{LINK}_checks", "if others and not own_blocks(wrapper):", "if others and not wrapper.in_atomic_block:"),
    ),
    _(
        31,
        "I1",
        "what a view wrote with INSERT … RETURNING before it enlisted is undone (Django, PyMySQL)",
        f"{CONNECTIONS}::test_caught_exception_undoes_the_whole_block[wsgi-own-blocks-write-mysql-pymysql]",
        (LINK, "self._inner.ask_if_begun()", "self._inner.has_begun()"),
    ),
    _(
        31,
        "I1",
        "what an async view of Django wrote before it enlisted is noticed on SQLite",
        f"{MISUSE}::test_committed_write_of_an_async_view_is_not_repeated[asgi-own-blocks-False-sqlite]",
        (REPORTS, "with noted(await _seen_in_thread(operation)):", "with noted(None):"),
    ),
    _(
        31,
        "I1",
        "a function in a block of Django on SQLite does not run",
        f"{MISUSE}::test_function_in_a_block_on_sqlite_is_refused_before_it_runs[wsgi-own-blocks-False-sqlite]",
        (f"{LINK}_checks", 'not wrapper.in_atomic_block or wrapper.vendor != "sqlite"', "True"),
    ),
    _(
        31,
        "I4",
        "a block on SQLite that has read is begun again when the key is reserved (REST framework)",
        f"{REST}::test_view_that_authenticates_in_the_database_runs_once[wsgi-atomic-requests-pay-external-False-sqlite]",
        (CALLS, "with set_aside(self.once.engine):", "if True:"),
    ),
    _(
        31,
        "I1",
        "what authentication wrote in a block on SQLite is not thrown away (REST framework)",
        f"{REST}::test_authentication_that_writes_in_the_block_is_refused_on_sqlite[wsgi-atomic-requests-sqlite]",
        ("oncekey.web.django.set_aside", "if before.has_written(raw):", "if False:"),
    ),
    _(
        31,
        "I1",
        "ATOMIC_REQUESTS is what Django did for this view, not what the setting says",
        f"{MISUSE}::test_committed_write_of_a_non_atomic_view_is_not_repeated[wsgi-atomic-requests-True-sqlite]",
        (LINK, "if before.atomic_requests:", 'if self._wrapper.settings_dict["ATOMIC_REQUESTS"]:'),
    ),
)
