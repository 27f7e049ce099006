"""OnceKey: the one object that an app makes. It joins a store, policies and a scope; the web modules use it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from oncekey.core import binding
from oncekey.core.binding import BindSecrets
from oncekey.core.by_operation import ByOperation
from oncekey.core.declarations import Declarations, chosen_policy, place_of
from oncekey.core.fingerprint import FINGERPRINT_VERSION, digest
from oncekey.core.policy import Policy
from oncekey.core.problems import ProfileName
from oncekey.core.recipe import Parts, Recipe
from oncekey.core.record import ENDPOINT_MARK, Reservation
from oncekey.core.routes import Route, Routes
from oncekey.core.states import Effects
from oncekey.core.steps import Find
from oncekey.core.verdicts import Resolver, Resolvers, Settlement, Verdict
from oncekey.engine import policy_checks, settlement
from oncekey.engine.direct import Direct
from oncekey.engine.flows import Flow
from oncekey.engine.lifespan import Lifespan
from oncekey.engine.limiter import Limiter
from oncekey.engine.parts import cache_of, engine_of, keyed_by, keyring_of, store_of
from oncekey.engine.request import AuthorizeFunction, ScopeFunction, SingleTenant
from oncekey.engine.resumption import Registered, ResumeFunction
from oncekey.errors import ConfigurationError
from oncekey.limits import Limits
from oncekey.stores.api import Store
from oncekey.telemetry.emitter import Emitter, Hook

if TYPE_CHECKING:
    from oncekey.encryption import Keyring
    from oncekey.telemetry.registry import Telemetry

_log = logging.getLogger("oncekey")

SINGLE_SCOPE = "single-tenant"
_Resolver = TypeVar("_Resolver", bound=Resolver)
_Handler = TypeVar("_Handler")
_Resume = TypeVar("_Resume", bound=ResumeFunction)


class OnceKey(Direct, Lifespan):
    """Protects an app's state-changing routes.

    ``url``      where keys are kept: ``sqlite:///app.db``, ``postgresql://…``, ``memory://``; or a Store
    ``scope``    a function of the request (sync or async) that returns the tenant, or raises NotAuthenticated for an
                 unknown caller; or SINGLE_TENANT. It has no default: without a tenant, a replay goes to every client
                 that knows the key
    ``authorize`` a function of the request and the operation's name (sync or async) that raises NotAuthorized (403). It
                 runs for every request with a key and on the status endpoint, before the key is looked up. Without it a
                 replay is authorized by ``scope`` alone: dependencies and decorators of the app do not run on a replay
    ``policy``   for every route that neither ``routes`` nor its handler (:meth:`policy`) gives one
    ``routes``   ``{"POST /payments": Policy(...), "POST /login": None}``; None exempts
    ``profile``  the format of error responses: ``ietf``, ``stripe`` or ``governance``
    ``docs_url`` where your documentation explains the key; linked from every problem
    ``status_url`` where the status resource is mounted, as clients reach it, such as ``/idempotency``: the Location of
                 a 202 that ``Policy(in_flight="accepted")`` answers
    ``migrate``  create or upgrade the tables on first use (SQLite always does)
    ``cache``    a server that keeps final answers in front of the store, ``redis://host``: replays then need no
                 question to the database. Needs ``cache_secret``, the same in all processes; ``cache_ttl`` is for how
                 many seconds an entry counts (docs/stores.md)
    ``encryption`` a keyring (``oncekey.encryption.Keyring``): bodies, headers, results, payloads and errors are then
                 encrypted before they reach the store (docs/encryption.md)
    ``bind_secret`` the secret of keys that are bound to a user (``Policy(bind=…)``), the same in all processes; the new
                 and the old one while it is replaced
    ``max_active_keys`` how many keys the store may hold for one tenant; more get 429
    ``limits``   where rates are counted, and what happens if they cannot be (:class:`oncekey.limits.Limits`)
    ``on_event`` called with every event (oncekey.telemetry.events)
    ``telemetry`` where metrics and traces go: ``"prometheus"``, ``"otel"``, an exporter, or a list of them
                 (docs/metrics.md). Without it nothing is measured
    ``grace``    how many seconds running handlers get at a shutdown, before the app closes what they use
    """

    def __init__(
        self,
        url: str | Store,
        *,
        scope: ScopeFunction | SingleTenant,
        authorize: AuthorizeFunction | None = None,
        policy: Policy | None = None,
        routes: Mapping[str, Policy | None] | None = None,
        profile: ProfileName = "ietf",
        docs_url: str | None = None,
        status_url: str | None = None,
        migrate: bool = False,
        cache: str | None = None,
        cache_secret: str | bytes | None = None,
        cache_ttl: float = 60.0,
        encryption: Keyring | None = None,
        bind_secret: BindSecrets | None = None,
        max_active_keys: int | None = None,
        limits: Limits | None = None,
        on_event: Hook | None = None,
        telemetry: Telemetry = None,
        max_queued: int = 10_000,
        grace: float = 10.0,
    ) -> None:
        policy_checks.check_options(url, policy, profile, scope, authorize, on_event)
        policy_checks.check_values(docs_url=docs_url, status_url=status_url, migrate=migrate, cache=cache)
        policy_checks.check_values(cache_secret=cache_secret, cache_ttl=cache_ttl, max_queued=max_queued, grace=grace)
        self.scope = scope
        self.authorize = authorize
        self.single_tenant = SINGLE_SCOPE if isinstance(scope, SingleTenant) else None
        """The scope of all requests with SINGLE_TENANT; otherwise None."""
        self.default_policy = policy or Policy()
        """The policy of every route that has none of its own."""
        self.routes = Routes(self.default_policy, routes)
        self.declarations = Declarations()
        """The policies that handlers declare with :meth:`policy`."""
        self.profile = profile
        self.docs_url = docs_url
        self.status_url = status_url
        self.max_active_keys = policy_checks.checked_cap(max_active_keys)
        self.limiter = Limiter(policy_checks.checked_limits(limits), self.max_active_keys)
        self.bind_secrets = binding.secrets_of(bind_secret)
        self.keyring = keyring_of(encryption)
        """What encrypts the contents of rows; None: they are not encrypted."""
        self.keyed = keyed_by(self.keyring)
        """Puts a keyed fingerprint into a reservation; None: there is no keyring."""
        store = store_of(url, self.keyring)
        front = cache_of(cache, cache_secret, cache_ttl, store, self.keyring)
        make = engine_of(telemetry, self.routes)
        engine = make(store, cache=front, emitter=Emitter(on_event), migrate=migrate, max_queued=max_queued)
        Direct.__init__(self)
        Lifespan.__init__(self, engine, migrate=migrate, grace=grace)
        policy_checks.check_limits(self)
        self.on_close(self._close_limiter)
        for each in (self.default_policy, *self.routes.listed.values()):
            self.check_policy(each)
        policy_checks.warn_of_unsigned_time({"the policy of the app": self.default_policy, **self.routes.listed})
        self.resolvers: Resolvers = ByOperation("resolver")
        self.resumes: ByOperation[Registered] = ByOperation("resume function")

    def _close_limiter(self) -> None:
        self.limiter.close()
        self.on_close(self._close_limiter)  # for the next close: a OnceKey opens again when it is used

    def check_policy(self, policy: Policy | None) -> None:
        """Raise ConfigurationError for a policy that needs a setting or a store which this OnceKey does not have."""
        policy_checks.check_policy(policy, self)

    def reservation(
        self,
        route: Route,
        *,
        tenant: str,
        key: str,
        owner: str,
        parts: Parts,
        lines: Sequence[tuple[bytes, bytes]],
        bound_to: str | None = None,
        recipe: Recipe | None = None,
    ) -> Reservation:
        """The reservation of a request. ``lines``: the headers that the route's recipe names. ``bound_to``: what the
        route's bind function returned. ``recipe``: of a function, in place of its policy's."""
        policy = route.policy
        scope = tenant  # our own constant needs no check
        if tenant is not SINGLE_SCOPE or policy.key_per != "tenant":
            scope = self.key_scope(tenant, None if policy.key_per == "tenant" else route.operation)
        recipe = recipe or policy.recipe
        text = recipe.text
        hashes: tuple[str, ...] = ()
        if policy.bind is not None:
            hashes = binding.hashes(self.bind_secrets, scope, key, bound_to)
            text = binding.bound_recipe(text, hashes[0])
        method, path, query, content_type, body, _ = parts
        wanted = Reservation(
            scope,
            key,
            route.operation,
            digest(method, path, query, content_type, body, lines, recipe.fields, FINGERPRINT_VERSION),
            FINGERPRINT_VERSION,
            policy.effects_kind,
            owner,
            policy.lease_seconds,
            policy.retention_seconds,
            text,
            policy.quarantine_seconds,
            parts,
            hashes,
        )
        return wanted if self.keyed is None else self.keyed(wanted)

    # -- policies at the handler ---------------------------------------------------------------------------------

    @overload
    def policy(self, policy: Policy | None, /) -> Callable[[_Handler], _Handler]: ...
    @overload
    def policy(self, /, **options: Any) -> Callable[[_Handler], _Handler]: ...

    def policy(self, /, *given: Policy | None, **options: Any) -> Callable[[_Handler], _Handler]:
        """Declare the policy at the handler. It acts as an entry of ``routes`` for each route of the handler. ::

            @app.post("/payments")
            @once.policy(effects="transactional")
            def pay(): ...

        It takes the options of a :class:`Policy`, a Policy, or None, which exempts. As in ``routes``, options replace
        the app's policy as a whole. ``@once.policy()`` declares the app's policy for this handler. It may stand above
        or below the framework's own decorator, and returns the same function.
        """
        chosen = chosen_policy(given, options, self.default_policy)
        self.check_policy(chosen)

        def declare(handler: _Handler) -> _Handler:
            policy_checks.warn_of_unsigned_time({place_of(handler): chosen})
            self.declarations.declare(handler, chosen)
            return handler

        return declare

    def exempt(self, handler: _Handler) -> _Handler:
        """``@once.exempt``: the same as ``@once.policy(None)``."""
        self.declarations.declare(handler, None)
        return handler

    # -- unknown outcomes ----------------------------------------------------------------------------------------

    def resolver(self, *operations: str) -> Callable[[_Resolver], _Resolver]:
        """Register a function, sync or async, that finds out what became of keys of these operations.

        It gets an Inquiry and returns Confirmed, Refuted, Happened, NotHappened or
        StillUnknown. An exception counts as StillUnknown. The
        reconciler (:class:`oncekey.upkeep.Upkeep`) calls it again and again until it knows.
        """
        if not operations or not all(isinstance(operation, str) for operation in operations):
            raise ConfigurationError("@once.resolver(…): name the operations, as in @once.resolver('POST /payments')")

        def register(function: _Resolver) -> _Resolver:
            for operation in operations:
                self.resolve_with(operation, function)
            return function

        return register

    def resolve_with(self, operation: str, function: Resolver) -> None:
        """As :meth:`resolver`, without a decorator."""
        self.resolvers.add(operation, function)

    async def ingest(
        self,
        verdict: Verdict,
        *,
        key: str | None = None,
        scope: str | None = None,
        operation: str | None = None,
        downstream_key: str | None = None,
        provider_id: str | None = None,
        who: str = "webhook",
    ) -> Settlement:
        """Settle a key by a verdict from outside, such as a provider's webhook. Safe to call twice and in any order.

        Name the key by ``key`` (with its ``scope``, and where keys are per endpoint its ``operation``), or by the
        ``downstream_key`` or ``provider_id`` of one of its steps or jobs. ``who`` is the actor's name in the audit.
        """
        flow = self._ingest(verdict, self._asked(key, scope, operation, downstream_key, provider_id), who)
        return await self.engine.run(flow, settlement.SETTLE_SECONDS)

    def ingest_blocking(
        self,
        verdict: Verdict,
        *,
        key: str | None = None,
        scope: str | None = None,
        operation: str | None = None,
        downstream_key: str | None = None,
        provider_id: str | None = None,
        who: str = "webhook",
    ) -> Settlement:
        """As :meth:`ingest`, for code that is not async."""
        flow = self._ingest(verdict, self._asked(key, scope, operation, downstream_key, provider_id), who)
        return self.engine.run_blocking(flow, settlement.SETTLE_SECONDS)

    def _ingest(self, verdict: Verdict, asked: tuple[str, str] | Find, who: str) -> Flow[Settlement]:
        return settlement.ingest(self.engine, asked, settlement.checked(verdict), who=who)

    def _asked(
        self, key: str | None, scope: str | None, operation: str | None, *others: str | None
    ) -> tuple[str, str] | Find:
        scope = scope or self.single_tenant
        if scope is not None and operation is not None and self.policy_of(operation).key_per == "endpoint":
            scope = f"{scope}{ENDPOINT_MARK}{operation}"
        return settlement.asked_for(key, scope, *others)

    def policy_of(self, operation: str) -> Policy:
        """The policy of an operation, by its name in the record."""
        return self.routes.listed.get(operation) or self.declarations.policies.get(operation) or self.default_policy

    # -- half-done requests --------------------------------------------------------------------------------------

    @overload
    def resume(self, operation: str, *, policy: Policy | None = None) -> Callable[[_Resume], _Resume]: ...
    @overload
    def resume(self, operation: str, function: _Resume, *, policy: Policy | None = None) -> _Resume: ...
    def resume(self, operation: str, function: ResumeFunction | None = None, *, policy: Policy | None = None) -> Any:
        """Register a function, sync or async, by which upkeep continues half-done requests of a phased route.

        ``once.resume("POST /rides", go_on)``, or ``@once.resume("POST /rides")``. It gets the operation, runs the
        handler's steps with the same names and in the same order, and returns the final response:
        ``Response(status, json)`` or ``(status, json)``. Upkeep calls it if the client has not come back for a while,
        and right after a verdict that settles the effect in doubt (:class:`oncekey.upkeep.Upkeep`).

        ``policy`` is the route's policy. Give it if ``@once.policy`` declares it at the handler and upkeep is a process
        of its own, which does not start the app. A policy in ``routes``, or one that the app has found, comes first.
        """
        if function is None:
            return partial(self.resume, operation, policy=policy)
        if not callable(function):
            raise ConfigurationError(f"once.resume({operation!r}, …): it takes a function of the operation")
        if policy is not None and policy.effects_kind is not Effects.PHASED:
            raise ConfigurationError(f"once.resume({operation!r}, policy=…): only a phased route can be resumed")
        self.resumes.add(operation, Registered(function, policy))
        return function

    def resumes_under(self, operation: str) -> Policy | None:
        """The policy by which upkeep continues a key of this operation. None: the route is not phased here."""
        listed, declared = self.routes.listed, self.declarations.policies
        registered = self.resumes.of(operation)
        policy: Policy | None = self.default_policy
        if operation in listed:
            policy = listed[operation]
        elif operation in declared:
            policy = declared[operation]
        elif registered is not None and registered.policy is not None:
            policy = registered.policy
        return policy if policy is not None and policy.effects_kind is Effects.PHASED else None

    def key_scope(self, tenant: str, operation: str | None = None) -> str:
        """The scope under which a tenant's keys are kept: of all its endpoints, or of one (``key_per="endpoint"``)."""
        policy_checks.check_tenant(tenant)
        return tenant if operation is None else f"{tenant}{ENDPOINT_MARK}{operation}"
