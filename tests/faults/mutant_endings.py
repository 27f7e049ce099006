# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of how a handler ended, of which request it was, and of deploys: see ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

EVIDENCE, JUDGMENT, DECISION = "oncekey.core.evidence", "oncekey.core.judgment", "oncekey.core.decision"
ENDPOINTS, ENDINGS_MODULE, HANDLING = "oncekey.web.endpoints", "oncekey.web.endings", "oncekey.web.handling"
TABLE = "tests/core/test_judgment.py::test_every_row_of_the_table_gives_its_judgment"
BUGS = "tests/faults/test_in_place.py::test_answer_in_place_that_was_a_bug_keeps_the_promises"
IN_PLACE, WORD = "tests/web/test_answers_in_its_place.py", "tests/web/test_handlers_word.py"
NEVER, COMMITS = "tests/web/test_never_entered.py", "tests/web/test_answers_and_commits.py"
DECLARED = "tests/web/verdicts/test_declarations.py"
ALL_ENDINGS = "tests/web/verdicts/test_table.py::test_three_sends_of_one_key_follow_the_table"

ENDINGS: tuple[Mutant, ...] = (
    # 33 and 34: what was seen of the endpoint
    _(34, "I1", "an endpoint reports that it is entered", f"{IN_PLACE}::test_any_status_of_a_timeout_makes_the_key_unknown",
      (ENDPOINTS, "        evidence.entered()\n        try:\n            result = await call(", "        evidence.running += 1\n        try:\n            result = await call(")),
    _(34, "I1", "a plain endpoint reports that it is entered", f"{DECLARED}::test_endpoint_is_heard_however_it_is_declared",
      (ENDPOINTS, "        evidence.entered()\n        try:\n            result = call(", "        evidence.running += 1\n        try:\n            result = call(")),
    _(33, "I1", "an endpoint reports what it returned", f"{WORD}::test_returned_error_is_the_handlers_word",
      (ENDPOINTS, "            result = await call(*args, **kwargs)\n            status = returned(result, kwargs)\n", "            result = await call(*args, **kwargs)\n            status = 402\n")),
    _(33, "I1", "an endpoint reports what it raised", f"{WORD}::test_success_of_an_error_handler_is_not_sent",
      (ENDPOINTS, "            result = await call(*args, **kwargs)\n            status = returned(result, kwargs)\n        except BaseException as error:\n            evidence.raised_with(error, raised(error))\n", "            result = await call(*args, **kwargs)\n            status = returned(result, kwargs)\n        except BaseException:\n            evidence.returned_with(200)\n")),
    _(34, "I1", "a view of Flask reports that it is entered", f"{BUGS}[an environ of the middleware's own making]",
      ("oncekey.web.flask", "        evidence.entered()\n", "        evidence.running += 1\n")),
    _(34, "I1", "a view of Flask is found by its context", f"{BUGS}[an environ of the middleware's own making]",
      ("oncekey.web.wsgi", "        exchange = _running.get()\n", "        pass\n")),
    _(34, "I1", "an endpoint that was cancelled has given no word", "tests/core/test_evidence.py::test_call_that_was_cancelled_has_neither_returned_nor_raised",
      (EVIDENCE, "self.raised = isinstance(error, Exception)", "self.raised = True")),
    _(34, "I1", "a later call forgets what an earlier one said", "tests/core/test_evidence.py::test_later_call_forgets_what_an_earlier_one_said",
      (EVIDENCE, "        self.returned = self.raised_status = self.error = None\n", "")),
    _(34, "I1", "a word of a later call says nothing of an earlier one", f"{IN_PLACE}::test_word_of_a_later_call_does_not_hold_for_an_earlier_one",
      (JUDGMENT, "if seen.calls > 1 and word != \"outcome_unknown\":", "if False:"),
      (JUDGMENT, "if seen.calls > 1 and judgment.event is not Event.COMPLETE:", "if False:")),
    _(34, "I1", "an app that is not wrapped counts as entered", f"{DECLARED}::test_endpoint_that_is_not_wrapped_counts_as_entered",
      (ENDPOINTS, "            operation.evidence.covered = False\n", "            pass\n")),
    _(34, "I1", "a mounted app of another kind is marked as foreign", f"{ALL_ENDINGS}[not wrapped: 400 | mounted | external]",
      ("oncekey.web.starlette", "            elif not _is_foreign(route.app):\n                route.app = ForeignApp(route.app)\n        elif isinstance(route, Route):\n", "        elif isinstance(route, Route):\n")),
    _(34, "I1", "a raw endpoint is marked as foreign", f"{DECLARED}::test_endpoint_that_is_not_wrapped_counts_as_entered",
      ("oncekey.web.starlette", "            if not (_wrap_function(route) or _wrap_class(route) or _is_foreign(route.app)):\n", "            if not (_wrap_function(route) or _wrap_class(route) or True):\n")),
    _(34, "I1", "without a call, only a covered app was not entered", TABLE,
      (JUDGMENT, "    if not seen.covered:\n", "    if False:\n")),
    _(34, "I1", "an answer while the endpoint runs is not its word", TABLE,
      (JUDGMENT, "if seen.running or (seen.returned is None and not seen.raised):", "if False:")),
    _(34, "I1", "an answer waits for a handler whose transaction is open",
      f"{COMMITS}::test_answer_in_its_place_waits_for_a_handler_with_an_open_transaction",
      (HANDLING, "if self.operation.enlisted is not None and self.operation.evidence.running:", "if False:")),
    _(34, "I1", "an effect that begins after the judgment makes a release a doubt",
      "tests/engine/test_finish.py::test_release_is_refused_if_an_effect_began_after_the_judgment",
      ("oncekey.engine.engine", "from_effects=unless_begun,", "from_effects=None,")),
    _(34, "I1", "a retryable status of middleware is not the endpoint's", f"{BUGS}[a 429 for an exception of any kind]",
      (JUDGMENT, "    if status in policy.retryable_statuses and own != status:\n", "    if False:\n")),
    _(34, "I2", "one response is sent", f"{COMMITS}::test_second_response_of_the_app_is_not_sent",
      (HANDLING, "        elif self.concluded and kind in _RESPONSE:\n", "        elif False:\n")),
    # 33: a success with its rows
    _(33, "I2", "a success that is not stored is not sent", "tests/core/test_judgment_properties.py::test_success_is_sent_only_if_it_is_stored_or_nothing_happened",
      (JUDGMENT, "        return Judgment(judgment.event, ours=True)\n", "        return judgment\n")),
    _(33, "I2", "our answer takes the place of that success", f"{WORD}::test_success_of_an_error_handler_is_not_sent",
      (ENDINGS_MODULE, "instead = in_place_of(event, once) if judgment.ours else None", "instead = None")),
    _(33, "I2", "a success of middleware in WSGI is not sent after a failure", f"{BUGS}[a redirect for an exception that Flask let pass]",
      ("oncekey.web.wsgi", "            self.instead = in_place_of(event, self.once)\n", "            pass\n")),
    _(33, "I1", "an exception rolls back, also where it becomes a 4xx", TABLE,
      (JUDGMENT, "    return _client_error(status, policy, _FAIL_ROLLED_BACK)\n\n\ndef _is_server_error", "    return _client_error(status, policy, _FAIL)\n\n\ndef _is_server_error")),
    _(33, "I1", "what was judged is what is committed", f"{ALL_ENDINGS}[raised 402 | starlette | transactional]",
      (ENDINGS_MODULE, "    operation.commits = judgment.commits\n", "    operation.commits = True\n")),
    _(33, "I8", "an error after defer() rolls its job back", "tests/engine/test_staging.py::test_an_error_is_no_promise",
      (ENDINGS_MODULE, "            operation.commits = False  #", "            pass  #")),
    _(33, "I1", "only a redirect of the endpoint's own commits what it raised", "tests/engine/test_staging.py::test_raised_answer_after_defer_is_pending_only_with_its_job",
      (JUDGMENT, "return _COMPLETE if own == status and status >= 300 else undone(policy)", "return _COMPLETE")),
    _(33, "I1", "an open effect makes every error unknown", "tests/web/test_open_effects.py::test_error_over_an_open_effect_makes_the_key_unknown",
      (JUDGMENT, "    elif open_effect and judgment.event is not Event.COMPLETE:\n", "    elif False:\n")),
    _(33, "I1", "what a step says of itself settles no other",
      "tests/engine/test_steps_trouble.py::test_not_executed_of_another_effect_does_not_take_the_doubt_back",
      ("oncekey.engine.operation", "case NotExecuted() if self.steps is None or not any(said is error for said in self.steps.not_executed):", "case NotExecuted():")),
    # 14: what an error means
    _(14, "I1", "where no word was given, an external key is unknown", TABLE,
      (JUDGMENT, "return _DOUBT if policy.effects_kind is Effects.EXTERNAL else _RELEASE", "return _RELEASE")),
    _(14, "I4", "a 500 is not stored for ever", TABLE,
      (JUDGMENT, "        case _:\n            return undone(policy)\n", "        case _:\n            return _FAIL_ROLLED_BACK\n")),
    _(14, "I4", "425 and 429 are not stored", "tests/web/test_checklist_endings.py::test_retryable_status_is_not_stored",
      (JUDGMENT, "return _RELEASE if status in policy.retryable_statuses or not policy.final_client_errors else final", "return final")),
    _(14, "I1", "retryable statuses are the route's to name", "tests/core/test_judgment.py::test_retryable_statuses_are_the_routes_to_name",
      (JUDGMENT, "    if given in policy.retryable_statuses:\n        return _RELEASE\n", "")),
    _(14, "I1", "408 is a server error", TABLE,
      (JUDGMENT, "return status >= 500 or status == 408", "return status >= 500")),
    _(14, "I1", "on_server_error is for the endpoint's own word", f"{WORD}::test_on_server_error_does_not_hold_for_an_exception_that_a_handler_answers",
      (JUDGMENT, "if own is not None and _is_server_error(own) and _says_more(own, policy):\n            return _server_error(own, status, policy)", "if status is not None and _says_more(status, policy):\n            return _server_error(status, status, policy)")),
    _(14, "I1", "on_server_error is not for middleware", f"{IN_PLACE}::test_declared_meaning_of_a_status_does_not_hold_for_a_timeout",
      (JUDGMENT, "        return undone(policy)  # an answer in the endpoint's place\n", "        return _not_wrapped(status, policy)\n")),
    # 38: refused before it was entered
    _(38, "I4", "what middleware refuses leaves the key unused", f"{NEVER}::test_refusal_of_middleware_leaves_the_key_unused",
      (JUDGMENT, "    if seen.refused or (status is not None and status != 408 and status < 500):\n", "    if seen.refused:\n")),
    _(38, "I4", "a validation handler that fails leaves the key unused", f"{NEVER}::test_validation_handler_that_fails_leaves_the_key_unused",
      ("oncekey.web.starlette", "            operation.evidence.refused_by_validation()\n", "            pass\n")),
    _(38, "I1", "validation refuses only before the endpoint is entered", "tests/core/test_evidence.py::test_validation_refuses_only_before_the_endpoint_is_entered",
      (EVIDENCE, "        if not self.calls:\n            self.refused", "        if True:\n            self.refused")),
    _(38, "I1", "a later attempt that is refused gives the key back as it was", f"{NEVER}::test_refusal_of_a_later_attempt_gives_the_key_back",
      (JUDGMENT, "return _DISCARD if first_attempt else _GIVEN_BACK", "return _DISCARD")),
    _(38, "I1", "a dependency that used a verb has begun", "tests/core/test_judgment.py::test_verb_of_a_dependency_counts_as_begun",
      (JUDGMENT, "    if begun:  # a dependency", "    if False:  # a dependency")),
    _(38, "I1", "refuse() after a verb is refused", "tests/engine/test_operation.py::test_refuse_after_a_verb_raises",
      ("oncekey.engine.operation", "        if self.begun:\n            raise ApplicationError(\"refuse()", "        if False:\n            raise ApplicationError(\"refuse()")),
    # 16: stored, then sent; and what others see
    _(16, "I2", "a response is stored before it is sent", "tests/web/test_asgi_responses.py::test_a_response_is_stored_before_it_is_sent",
      (HANDLING, "        self._check_route()\n", "        if body is not None:\n            await self._pass_on(*messages(status, list(raw_headers), body))\n        self._check_route()\n")),
    # 35 to 37 and 39: whose request, and which
    _(35, "I6", "header names are found in any case", "tests/web/test_frameworks_requests.py::test_tenant_is_found_by_a_header_name_in_any_case",
      ("oncekey.engine.request", "self._values[name.lower()]", "self._values[name]")),
    _(36, "I5", "the named headers are part of the request", "tests/web/test_recipes.py::test_if_match_makes_another_request",
      ("oncekey.core.recipe", "lines = read_lines(self.headers) if self.headers else ()", "lines = ()")),
    _(37, "I5", "a request is compared by the recipe of the row", "tests/core/test_recipe.py::test_what_counts_is_what_the_row_was_made_of",
      ("oncekey.core.recipe", "    recipe = _read(text)\n    return None", "    recipe = _read(ours)\n    return None")),
    _(37, "I5", "a recipe that is not known is not compared", "tests/core/test_recipe.py::test_recipe_that_is_not_known_is_not_compared",
      ("oncekey.core.recipe", "    if not isinstance(said, dict) or \"headers\" not in said or not said.keys() <= {\"fields\", \"headers\"}:\n        return None\n", "    if not isinstance(said, dict):\n        return None\n    said.setdefault(\"headers\", [])\n")),
    _(39, "I6", "the caller is authorized before the look-up (ASGI)", "tests/web/test_authorize.py::test_replay_is_not_given_to_a_caller_who_may_not_use_the_operation",
      ("oncekey.web.asgi", "        if authorize and once.authorize is not None:\n", "        if False:\n")),
    _(39, "I6", "the caller is authorized before the look-up (WSGI)", "tests/web/test_authorize.py::test_replay_is_not_given_to_a_caller_who_may_not_use_the_operation",
      ("oncekey.web.wsgi", "        if authorize and once.authorize is not None:\n", "        if False:\n")),
    _(20, "I1", "a body of another length than it says is refused", "tests/web/test_asgi_body_length.py::test_body_of_another_length_is_refused_and_takes_no_key",
      ("oncekey.web.asgi", "(length is not None and len(body) != length) or", "False or")),
    _(20, "I1", "a body that the server dropped is refused", "tests/web/test_asgi_body_length.py::test_payment_whose_body_the_server_dropped_does_not_run",
      ("oncekey.web.asgi", "(not body and self._may_have_been_dropped())", "False")),
    # 37: a deploy between two attempts
    _(37, "I1", "what an earlier declaration did is not done again", "tests/faults/test_redeployed.py::test_second_charge_after_a_deploy_is_noticed",
      (DECISION, "            if (reason := _not_again(record, wanted.effects)) is not None:\n", "            if (reason := None) is not None:\n")),
)  # fmt: skip
