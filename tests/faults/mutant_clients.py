"""The guards of the client and of the commands of operators. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

ORIGINS, EXPIRY, COMMANDS, LOST, FORM = (
    f"tests/client/test_{name}.py" for name in ("origins", "jar_expiry", "commands", "lost_jar", "key_header")
)
ATTEMPTS, JAR, SQLITE = "oncekey.client.attempts", "oncekey.client.jar.jar", "oncekey.client.jar.sqlite"

CLIENTS: tuple[Mutant, ...] = (
    # 60: a client sends what it must not, or where it must not
    _(
        60,
        "I6",
        "a client sends to its own origin only",
        f"{ORIGINS}::test_url_of_another_origin_is_refused_and_gets_no_credentials",
        (
            "oncekey.client.base",
            "if given.is_absolute_url and origin(str(given)) != origin(self.base_url):",
            "if False:",
        ),
    ),
    _(
        60,
        "I6",
        "a session of aiohttp sends to its own origin only",
        f"{ORIGINS}::test_url_of_another_origin_is_refused_by_the_async_client_and_by_aiohttp",
        ("oncekey.client.aiohttp", "if self._base and origin(str(whole)) != origin(self._base):", "if False:"),
    ),
    _(
        60,
        "I6",
        "resume sends no intent of another server",
        f"{ORIGINS}::test_resume_sends_credentials_to_its_own_server_only",
        ("oncekey.client.resumption", "if origin(row.request.url) != self._origin:", "if False:"),
    ),
    _(
        60,
        "I4",
        "resume names an intent whose key the server may have forgotten",
        f"{EXPIRY}::test_expired_intent_is_named_though_its_server_asked_to_wait_longer",
        ("oncekey.client.resumption", "if end is not None and now >= end and not self._again:", "if False:"),
    ),
    _(
        60,
        "I1",
        "an intent whose key the server may have forgotten is not sent",
        f"{EXPIRY}::test_resume_past_the_key_lifetime_does_not_run_the_request_a_second_time",
        ("oncekey.client.jar.intent", "if end is None or now < end:", "if True:"),
    ),
    _(
        60,
        "I1",
        "key_lifetime is kept with the intent",
        f"{EXPIRY}::test_key_lifetime_is_kept_with_the_intent_for_processes_that_do_not_set_it",
        (JAR, "(self._key_lifetime or row.key_lifetime)", "(self._key_lifetime or DAY)"),
    ),
    _(
        60,
        "I1",
        "tries end before the server forgets the key",
        f"{EXPIRY}::test_tries_end_before_the_key_lifetime_does",
        (ATTEMPTS, "+ wait >= min(self._budget_end, self._key_end):", "+ wait >= self._budget_end:"),
    ),
    _(
        60,
        "I1",
        "a try ends before the server forgets the key",
        f"{EXPIRY}::test_try_gets_no_more_time_than_the_server_keeps_the_key",
        (
            ATTEMPTS,
            "min(self._budget_end, self._key_end) - self.rules.clock()",
            "self._budget_end - self.rules.clock()",
        ),
    ),
    _(
        60,
        "I1",
        "a redirect is not followed after the server has forgotten the key",
        f"{EXPIRY}::test_request_is_not_sent_on_after_its_key_has_expired",
        (ATTEMPTS, "if act in (Act.SPELL, Act.FOLLOW) and self.rules.clock() >= self._key_end:", "if False:"),
    ),
    _(
        60,
        "I1",
        "tries go by the last Idempotency-Expires of the server",
        f"{EXPIRY}::test_tries_go_by_the_last_expiry_that_the_server_named",
        (ATTEMPTS, "            self._key_end = self.rules.clock() + expires - now\n", "            pass\n"),
    ),
    _(
        60,
        "I1",
        "key_lifetime without a jar of its own is refused",
        f"{EXPIRY}::test_key_lifetime_that_is_no_length_of_time_is_refused",
        ("oncekey.client.base", "if not isinstance(jar, str) and key_lifetime is not None:", "if False:"),
    ),
    _(
        60,
        "I1",
        "--key-lifetime reaches the jar",
        f"{COMMANDS}::test_resume_goes_by_the_key_lifetime_of_the_option_or_of_the_intent",
        ("oncekey.cli.client_options", "key_lifetime=lifetime(key_lifetime)", "key_lifetime=None"),
    ),
    _(
        60,
        "I1",
        "the name of an intent is a text",
        "tests/client/test_intents.py::test_name_that_is_no_text_is_refused_and_nothing_is_sent",
        (JAR, "if not isinstance(name, str) or not name.strip():", "if not name or not str(name).strip():"),
    ),
    _(
        60,
        "I1",
        "oncekey client forget asks first",
        f"{COMMANDS}::test_forget_asks_before_it_deletes_an_intent",
        ("oncekey.cli.client", "            agreed([_forgotten(found)], yes=yes)\n", ""),
    ),
    _(
        60,
        "I1",
        "oncekey client forget --finished asks first",
        f"{COMMANDS}::test_forget_asks_before_it_deletes_old_answers",
        ("oncekey.cli.client", "agreed([_all_forgotten(count, finished_days or 0)], yes=yes)", "pass"),
    ),
    _(
        60,
        "I4",
        "a jar that is not there is no empty jar",
        f"{COMMANDS}::test_jar_that_is_not_there_is_no_empty_jar",
        (SQLITE, "raise missing(str(self._path)) from None", "pass"),
    ),
    _(
        60,
        "I1",
        "a jar that must be there is not made in another file",
        f"{LOST}::test_database_of_the_app_without_the_table_is_a_new_jar",
        (SQLITE, 'raise missing(f"{self._path}: the file has no table {TABLE}")', "pass"),
    ),
    _(
        60,
        "I1",
        "a jar that was emptied is refused",
        f"{LOST}::test_emptied_jar_is_refused_and_nothing_is_sent",
        (SQLITE, "if not found.st_size:", "if False:"),
    ),
    _(
        60,
        "I1",
        "a jar is never empty while it is made",
        f"{LOST}::test_jar_that_is_killed_while_it_is_made_leaves_no_empty_file",
        (
            SQLITE,
            "                connection.execute(_CREATE)\n            os.link",
            "                pass\n            os.link",
        ),
    ),
    _(
        60,
        "I1",
        "a jar that is made new is warned about",
        f"{LOST}::test_jar_that_is_gone_is_made_new_with_a_warning",
        ("oncekey.client.jar.table", "if create is None:", "if False:"),
    ),
    _(
        60,
        "I1",
        "a resumed intent has its key under the header of its first try",
        f"{FORM}::test_command_resume_has_no_second_effect[header]",
        ("oncekey.client.jar.table", "KeyForm(self.key_header or own.header,", "KeyForm(own.header,"),
    ),
    _(
        60,
        "I1",
        "a resumed intent has its key in the spelling of its first try",
        f"{FORM}::test_command_resume_has_no_second_effect[spelling]",
        ("oncekey.client.jar.table", "self.spelling or own.spelling)", "own.spelling)"),
    ),
    _(
        60,
        "I1",
        "a prepared intent keeps header and spelling of its first try",
        f"{FORM}::test_prepared_intent_without_a_form_takes_that_of_the_client_that_sends_it_first[sqlite]",
        ("oncekey.client.jar.intent", "sent = found.form(form)", "sent = KeyForm(None, None)"),
    ),
    _(
        60,
        "I1",
        "--key-header reaches the client",
        f"{FORM}::test_options_of_the_commands_name_header_and_spelling",
        ("oncekey.cli.client_options", "header=key_header", 'header="Idempotency-Key"'),
    ),
    _(
        60,
        "I4",
        "a jar that cannot keep the header of a key is refused",
        f"{FORM}::test_jar_of_an_earlier_version_is_refused_and_its_columns_are_named[sqlite]",
        ("oncekey.client.jar.table", "    if lacking:\n", "    if False:\n"),
    ),
    # operators
    _(
        12,
        "I8",
        "a command creates no file where the store should be",
        "tests/cli/test_keys_list.py::test_command_refuses_a_missing_file_and_says_what_to_run",
        ("oncekey.cli.options", "if path is not None and not path.exists():", "if False:"),
    ),
    _(
        46,
        "I1",
        "a mask that several keys have changes none of them",
        "tests/cli/test_masked_keys.py::test_several_keys_with_one_mask_are_listed_and_none_is_changed",
        ("oncekey.admin.masks", "        if len(self.found) == 1:\n", "        if self.found:\n"),
    ),
    _(
        46,
        "I1",
        "an operator who does not agree changes nothing",
        "tests/cli/test_keys_resolve.py::test_resolve_shows_the_change_and_asks_before_it",
        (
            "oncekey.cli.prompts",
            'if not yes and _answer("Do it? [y/N]").strip().lower() not in ("y", "yes"):',
            'if not yes and not _answer("Do it? [y/N]"):',
        ),
    ),
    _(
        51,
        "I1",
        "oncekey routes --strict fails if a route is unprotected (Django)",
        "tests/web/test_django_project.py::test_strict_routes_fail_if_one_is_unprotected[sqlite]",
        (
            "oncekey.cli.routes",
            "if strict and (count := found.count(Coverage.UNPROTECTED)):",
            "if False and (count := 0):",
        ),
    ),
    _(
        51,
        "I1",
        "manage.py oncekey routes --strict looks at the project",
        "tests/web/test_django_project.py::test_strict_routes_fail_if_one_is_unprotected[sqlite]",
        (
            "oncekey.web.django.management.commands.oncekey",
            'all(str(each).startswith("-") for each in arguments[1:])',
            "not arguments[1:]",
        ),
    ),
    _(
        51,
        "I4",
        "resolvers of functions and queues are not named at start",
        "tests/web/test_declared_start.py::test_resolver_of_a_function_or_a_queue_is_not_named_at_start",
        ("oncekey.web.route_audit", 'if " /" in operation and not any(', "if not any("),
    ),
    # 30: the time of a 404
    _(
        30,
        "I6",
        "a 404 of the status endpoint is sent by the clock (ASGI)",
        "tests/security/test_timing.py::test_404_that_may_follow_a_found_row_is_sent_by_the_clock",
        ("oncekey.web.status", "            await pace.pause(asked.begun)\n", "            pass\n"),
    ),
    _(
        30,
        "I6",
        "a 404 of the status endpoint is sent by the clock (WSGI)",
        "tests/security/test_timing.py::test_404_that_may_follow_a_found_row_is_sent_by_the_clock",
        ("oncekey.web.status", "            pace.pause_blocking(asked.begun)\n", "            pass\n"),
    ),
    _(
        30,
        "I6",
        "a 404 is sent by the clock where keys are bound",
        "tests/security/test_timing.py::test_404_that_may_follow_a_found_row_is_sent_by_the_clock[bound]",
        (
            "oncekey.web.pace",
            "return once.authorize is not None or bool(once.bind_secrets)",
            "return once.authorize is not None",
        ),
    ),
    _(
        30,
        "I6",
        "a 404 is sent by the clock where authorize= refuses operations",
        "tests/security/test_timing.py::test_404_that_may_follow_a_found_row_is_sent_by_the_clock[operation]",
        (
            "oncekey.web.pace",
            "return once.authorize is not None or bool(once.bind_secrets)",
            "return bool(once.bind_secrets)",
        ),
    ),
    _(
        30,
        "I6",
        "a 404 is sent at a multiple of 20 ms, whatever the look-up took",
        "tests/security/test_timing.py::test_pause_ends_at_the_next_multiple_of_the_pace",
        ("oncekey.web.pace", "return ceil(took / PACE) * PACE - took", "return PACE"),
    ),
    _(
        28,
        "I6",
        "the status of a personal key says that a refusal executes nothing",
        "tests/web/test_personal_keys.py::test_404_of_a_personal_key_says_that_a_refusal_executes_nothing",
        (
            "oncekey.core.problem_texts",
            "If the operation does not take this key, the answer says so, and nothing is executed.",
            "",
        ),
    ),
    # functions, messages and resumed requests
    _(
        12,
        "I7",
        "a function on a store without tables raises StoreUnavailable",
        "tests/functions/test_function.py::test_key_that_cannot_be_looked_up_is_store_unavailable_with_the_reason",
        (
            "oncekey.functions.refusals",
            "    except OperatorError as error:\n",
            "    except StoreUnavailable as error:\n",
        ),
    ),
    _(
        59,
        "I2",
        "a response that does not open is not said to be gone (gRPC)",
        "tests/functions/test_grpc.py::test_response_that_does_not_open_says_to_ask_again_later",
        (
            "oncekey.functions.grpc",
            "if answer is not None and answer.schema_version != RESPONSE_SCHEMA_VERSION:",
            "if False:",
        ),
    ),
    _(
        45,
        "I4",
        "a resumed request that ended in an unexpected error is left to its lease",
        "tests/upkeep/test_resume_functions.py::test_lease_is_not_renewed_after_an_unexpected_error_at_the_end[sqlite]",
        (
            "oncekey.engine.last_move",
            "        engine.keeper.unwatch(operation)  # the lease runs out, and ``effects`` says what that means\n",
            "",
        ),
    ),
)
