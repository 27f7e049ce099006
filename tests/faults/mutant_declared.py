# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of declarations: which requests they count for, and what is said of those without effect. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

DECLARATIONS, ROUTER, COVERAGE = "oncekey.core.declarations", "oncekey.web.starlette_router", "oncekey.web.route_audit"
CHECK, ASGI, STARLETTE = "oncekey.web.declared", "oncekey.web.asgi", "oncekey.web.starlette"
REQUESTS, START = "tests/web/test_declared.py", "tests/web/test_declared_start.py"
HANDLERS = "tests/web/test_declared_handlers.py"
ALONE = "test_declaration_counts_for_its_handler_and_not_for_others_that_fit_the_path"
EVERYWHERE = "test_declared_handler_runs_under_its_policy_and_others_under_the_apps"

DECLARED: tuple[Mutant, ...] = (
    # 51: some routes of a flow are protected, others are not, or under the policy of another
    _(51, "I1", "a declaration is looked for at the handler (ASGI)", f"{REQUESTS}::{EVERYWHERE}[fastapi-below]",
      (ASGI, "        if self.once.declarations.exist and self.endpoints is not None:", "        if False:")),
    _(51, "I1", "a declaration is looked for at the handler (WSGI)", f"{REQUESTS}::{EVERYWHERE}[flask-below]",
      ("oncekey.web.wsgi", "        if self.once.declarations.exist and self.endpoints is not None and", "        if False and")),
    _(51, "I1", "the endpoints of a WSGI framework are wrapped before each call",
      "tests/web/test_toy_wsgi_framework.py::TestViews::test_late_endpoint_is_wrapped",
      ("oncekey.web.wsgi_shell", "covered=self.endpoints is not None and self.endpoints.cover())", "covered=self.endpoints is not None)")),
    _(51, "I1", "a declaration holds for the first request of a process (Django)",
      "tests/web/test_django_project.py::test_declaration_holds_for_the_first_request_of_a_process[sqlite]",
      ("oncekey.web.django.middleware", "            get_resolver(urlconf).url_patterns  # noqa: B018", "            pass  # noqa: B018")),
    _(51, "I1", "the first route that takes the request has it", f"{HANDLERS}::{ALONE}[starlette]",
      (ROUTER, "        for route in self._routes.get(id(router), ()):\n", "        for route in reversed(self._routes.get(id(router), [])):\n")),
    _(51, "I1", "a route of another method is passed over", f"{REQUESTS}::{EVERYWHERE}[starlette-below]",
      (ROUTER, "            if match is not Match.FULL:\n", "            if match is Match.NONE:\n")),
    _(51, "I1", "handlers of mounted apps are found", f"{HANDLERS}::test_handlers_of_mounted_apps_hosts_and_class_endpoints_are_found",
      (ROUTER, "                return None if inner is None else self._find(", "                return None if True else self._find(")),
    _(51, "I1", "routes by host are not cached by path", f"{HANDLERS}::test_handlers_of_mounted_apps_hosts_and_class_endpoints_are_found",
      (ROUTER, "        if not self._by_path_only:\n", "        if False:\n")),
    _(51, "I1", "a handler that was added later is found", f"{HANDLERS}::test_nested_routers_and_route_added_after_first_request",
      (STARLETTE, "        self.cover()\n        return self._router", "        return self._router")),
    _(51, "I1", "a subclass inherits no declaration of its class", f"{HANDLERS}::test_handlers_of_mounted_apps_hosts_and_class_endpoints_are_found",
      (DECLARATIONS, "getattr(candidate, \"__dict__\", {}).get(_ATTRIBUTE, ())", "getattr(candidate, _ATTRIBUTE, ())")),
    _(51, "I1", "safe methods of a declared handler pass", f"{HANDLERS}::test_safe_methods_of_a_declared_handler_pass[starlette]",
      (ASGI, "if method not in SAFE_METHODS and (handler", "if (handler")),
    _(51, "I1", "only='declared' leaves other handlers unprotected", f"{REQUESTS}::test_only_declared_protects_declared_handlers_alone[starlette-below]",
      ("oncekey.core.routes", "if method in self._policy.methods and not self._only_listed:", "if method in self._policy.methods:")),
    _(51, "I1", "a handler's policy is checked as that of a route", f"{REQUESTS}::test_wrong_declaration_is_refused",
      ("oncekey.engine.once", "        self.check_policy(chosen)\n", "")),
    _(51, "I1", "a handler is declared once", f"{REQUESTS}::test_wrong_declaration_is_refused",
      (DECLARATIONS, "        if self._own(function) is not None:\n", "        if False:\n")),
    _(51, "I1", "two declarations of one route are refused", f"{START}::test_route_declared_at_handler_and_in_routes_is_refused_with_both_places[fastapi]",
      (COVERAGE, "        if (listed := _listed(method, spot, layer)) is not None:\n", "        if (listed := None) is not None:\n")),
    _(51, "I1", "declarations are looked through before the start", f"{START}::test_route_declared_at_handler_and_in_routes_is_refused_with_both_places[starlette]",
      ("oncekey.web.asgi_lifespan", "            require_asyncio()\n            prepare()\n", "            require_asyncio()\n")),
    _(51, "I1", "declarations are looked through before the first request (WSGI)", f"{START}::test_route_declared_at_handler_and_in_routes_is_refused_with_both_places[flask]",
      ("oncekey.web.wsgi", "            check_declarations(self, self.once, self.only)", "            pass")),
    _(51, "I1", "declarations are looked through before the start (Litestar)", f"{START}::test_route_declared_at_handler_and_in_routes_is_refused_with_both_places[litestar]",
      ("oncekey.web.litestar", "        self._handlers.check_app(app, self._once, self._only)\n", "")),
    _(51, "I1", "Flask's routes are looked through at protect", f"{START}::test_flask_protect_refuses_two_declarations_of_a_route",
      ("oncekey.web.flask", "    if once.declarations.exist:\n", "    if False:\n")),
    _(51, "I1", "a declaration for another OnceKey is refused", f"{START}::test_handler_declared_for_another_oncekey_is_refused[fastapi]",
      (COVERAGE, "            if (other := declarations.of_others(spot.endpoint, method)) is not None:\n", "            if (other := None) is not None:\n")),
    _(51, "I1", "a OnceKey under an outer one that takes all requests is refused", f"{START}::test_mounted_app_with_its_own_oncekey_under_one_that_takes_all_is_refused",
      (COVERAGE, "if layer.handlers and (takes_it or not inner):", "if layer.handlers and not inner:")),
    _(51, "I1", "a declaration that a decorator hides is refused", f"{START}::test_declaration_behind_a_decorator_without_wraps_is_refused[fastapi]",
      (COVERAGE, "            if (hidden := declarations.hidden_in(spot.endpoint, method)) is not None:\n", "            if (hidden := None) is not None:\n")),
    _(51, "I4", "values in a handler's closure are not called", f"{START}::test_closure_of_a_handler_is_looked_at_and_nothing_in_it_is_called",
      (DECLARATIONS, "            if type(layer) is not FunctionType or id(layer) in seen:", "            if id(layer) in seen:")),
    _(51, "I1", "a declaration that protects only safe methods is refused", f"{START}::test_declared_handler_that_answers_safe_methods_only_is_refused",
      (COVERAGE, "    for spot in found:\n        _refuse_safe_declaration(spot)\n", "")),
    _(51, "I1", "only='declared' that protects nothing is refused", f"{START}::test_only_declared_where_no_route_can_be_seen_and_none_is_listed_is_refused",
      (CHECK, "    if only is not None and not once.routes.listed and cannot_see:\n", "    if False:\n")),
    _(51, "I1", "declared handlers without a route are named", f"{START}::test_declared_handler_without_a_route_is_named_and_the_app_starts",
      (CHECK, "    if unused := [declaration.place for declaration in once.declarations.unused()]:\n", "    if unused := []:\n")),
    _(51, "I1", "routes without a declaration are named", f"{START}::test_undeclared_routes_are_named_once_in_one_warning[fastapi]",
      (CHECK, "    if only is not None and undeclared and not cannot_see:\n", "    if False:\n")),
)  # fmt: skip
