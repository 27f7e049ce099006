"""The setting ``ONCEKEY`` of a Django project, and ``once``, the OnceKey that is made of it.

``once`` is made when the first request, command or attribute needs it, not at import: views declare policies with it
while Django still loads, and a test runner gives its databases other names after that. Until then ``once`` remembers
what was declared.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.module_loading import import_string

from oncekey.core.declarations import chosen_policy
from oncekey.core.policy import Policy
from oncekey.engine.direct import OnceFunction
from oncekey.engine.once import OnceKey
from oncekey.engine.request import SINGLE_TENANT, SingleTenant
from oncekey.engine.transactions.adapters.django_checks import in_block
from oncekey.errors import ConfigurationError
from oncekey.stores.registry import KNOWN, find

_P = ParamSpec("_P")
_R = TypeVar("_R")

_OPTIONS = {
    "STORE": "url",
    "SCOPE": "scope",
    "AUTHORIZE": "authorize",
    "POLICY": "policy",
    "ROUTES": "routes",
    "PROFILE": "profile",
    "DOCS_URL": "docs_url",
    "STATUS_URL": "status_url",
    "MIGRATE": "migrate",
    "CACHE": "cache",
    "CACHE_SECRET": "cache_secret",
    "CACHE_TTL": "cache_ttl",
    "ENCRYPTION": "encryption",
    "BIND_SECRET": "bind_secret",
    "MAX_ACTIVE_KEYS": "max_active_keys",
    "LIMITS": "limits",
    "ON_EVENT": "on_event",
    "TELEMETRY": "telemetry",
    "MAX_QUEUED": "max_queued",
    "GRACE": "grace",
}
"""The settings that are options of a OnceKey."""
_SETTINGS = {option: setting for setting, option in _OPTIONS.items()}
_OF_OPTION = re.compile(r"(?:OnceKey\()?(\w+)(?:=(…|[^…]*?))?\)?: (.*)", re.DOTALL).fullmatch
"""What a OnceKey says of one option: its name, its value and what to write."""
_NAMED_OPTION = re.compile(r"(?:OnceKey\()?\b(\w+)=(?:…|'[^']*')\)?")
_OF_MIDDLEWARE = ("ONLY", "UPKEEP")
_FUNCTIONS = ("SCOPE", "AUTHORIZE", "ON_EVENT")
"""Settings that name a function by its dotted path."""


class Wrong(ImproperlyConfigured):
    """A setting that cannot be used. ``hint`` says what to write; ``number`` is of the system check."""

    def __init__(self, number: int, message: str, hint: str) -> None:
        super().__init__(f"{message}. {hint}")
        self.number, self.message, self.hint = number, message, hint


def read() -> dict[str, Any]:
    """The setting, with its names checked."""
    given = getattr(settings, "ONCEKEY", None)
    if not isinstance(given, dict):
        what = "is missing" if given is None else f"is a {type(given).__name__}, not a dict"
        raise Wrong(1, f"the setting ONCEKEY {what}", 'Write ONCEKEY = {"STORE": "default", "SCOPE": "path.to.tenant"}')
    known = [*_OPTIONS, *_OF_MIDDLEWARE]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name).upper(), known, 1)
            meant = f"Did you mean {near[0]!r}? " if near else ""
            raise Wrong(2, f"ONCEKEY has no setting {name!r}", f"{meant}It takes {', '.join(known)}")
    return given


def options() -> dict[str, Any]:
    """The arguments of the OnceKey that the settings describe. ``Wrong`` names the setting."""
    given = read()
    made = {_OPTIONS[name]: value for name, value in given.items() if name in _OPTIONS}
    made["url"] = store_url(given.get("STORE"))
    made["scope"] = _scope(given)
    for name in _FUNCTIONS[1:]:
        if given.get(name) is not None:
            made[_OPTIONS[name]] = _function(name, given[name])
    if "POLICY" in given:
        made["policy"] = _policy("ONCEKEY['POLICY']", given["POLICY"])
    if not isinstance(routes := given.get("ROUTES", {}), dict):
        raise Wrong(6, "ONCEKEY['ROUTES'] is not a dict", 'Write {"POST /payments": {"effects": "transactional"}}')
    made["routes"] = {
        route: None if policy is None else _policy(f"ONCEKEY['ROUTES'][{route!r}]", policy)
        for route, policy in routes.items()
    }
    return made


def make() -> OnceKey:
    """A new OnceKey of the settings."""
    arguments = options()
    try:
        made = OnceKey(**arguments)
    except ConfigurationError as error:
        raise _of_setting(error) from error
    made.engine.command = "manage.py oncekey"
    alias = database_alias()
    if alias is None:
        made.engine.how_to_enlist = "an alias of DATABASES as ONCEKEY['STORE'], and then current().enlist()"
    else:
        made.engine.own_connection = lambda: connections[alias]
        made.engine.in_own_block = partial(in_block, alias)
        made.engine.how_to_enlist = "current().enlist() in the transaction.atomic() of the {view}"
    return made


def _of_setting(error: ConfigurationError) -> Wrong:
    """What a OnceKey says of its options, in the words of the settings."""
    text, where = str(error), "docs/django.md says what each setting takes"
    found = _OF_OPTION(text)
    if found is not None and found[1] in _SETTINGS:
        name, value, takes = _SETTINGS[found[1]], found[2], found[3]
        is_wrong = "cannot be used" if value in (None, "…") else f"is {value}"
        return Wrong(7, f"ONCEKEY[{name!r}] {is_wrong}", takes[0].upper() + takes[1:])
    in_settings = _NAMED_OPTION.sub(
        lambda found: f"ONCEKEY[{_SETTINGS[found[1]]!r}]" if found[1] in _SETTINGS else found[0], text
    )
    return Wrong(7, f"ONCEKEY cannot be used: {in_settings}", where)


def database_alias() -> str | None:
    """The alias in DATABASES whose database keeps the keys; None: ``STORE`` is a URL."""
    store = read().get("STORE")
    return store if isinstance(store, str) and store in connections.settings else None


def store_url(store: Any) -> str:
    """The URL of the store: that of the setting, or that of the database with this alias, as it is now."""
    aliases = ", ".join(repr(alias) for alias in connections.settings)
    if not isinstance(store, str) or not store:
        what = "is missing" if store is None else f"is {store!r}"
        raise Wrong(3, f"ONCEKEY['STORE'] {what}", f"Write an alias of DATABASES ({aliases}), or a URL: {KNOWN}")
    if store not in connections.settings:
        if find(store) is None:
            raise Wrong(
                3,
                f"ONCEKEY['STORE'] is {_hidden(store)}, which is neither an alias of DATABASES nor the URL of a store",
                f"Write one of {aliases}, or one of {KNOWN}",
            )
        return store
    connection = connections[store]
    if connection.vendor not in _URLS:
        raise Wrong(
            3,
            f"ONCEKEY['STORE'] is {store!r}, a database of {connection.display_name}",
            f"An alias takes SQLite, PostgreSQL, MySQL and MariaDB. Give the URL of another store: {KNOWN}",
        )
    return _URLS[connection.vendor](store)


def _hidden(store: str) -> str:
    """The setting in a message: a URL may hold a password."""
    return repr(store) if "://" not in store else f"'{store.partition('://')[0]}://…'"


def _sqlite_url(alias: str) -> str:
    name = str(connections[alias].settings_dict["NAME"])
    if ":memory:" in name or name.startswith("file:") or not name:
        raise Wrong(
            4,
            f"ONCEKEY['STORE'] is {alias!r}, whose database is in memory or a URI, which oncekey cannot share",
            f"Give DATABASES[{alias!r}] a file. For tests, give the test database one: "
            f'DATABASES[{alias!r}]["TEST"] = {{"NAME": BASE_DIR / "test.sqlite3"}}, or set STORE to "memory://" there',
        )
    return f"sqlite:///{quote(name)}"


def _postgres_url(alias: str) -> str:
    ours = ("client_encoding", "prepare_threshold", "autocommit")
    parameters = {
        name: value
        for name, value in connections[alias].get_connection_params().items()
        if name not in ours and isinstance(value, str | int) and not isinstance(value, bool)
    }
    return f"postgresql:///?{urlencode(parameters, quote_via=quote)}"


def _mysql_url(alias: str) -> str:
    given = connections[alias].get_connection_params()
    if wrong := sorted({"read_default_file", "read_default_group"} & given.keys()):
        raise Wrong(
            4,
            f"ONCEKEY['STORE'] is {alias!r}, whose OPTIONS have {wrong[0]!r}: oncekey cannot read that file",
            f"Write NAME, USER, PASSWORD, HOST and PORT into DATABASES[{alias!r}], or give STORE a mysql:// URL",
        )
    ssl, mode = given.get("ssl"), given.get("ssl_mode")
    options = {name: value for name, value in given.items() if name == "unix_socket" or name.startswith("ssl_")}
    options.pop("ssl_mode", None)
    options |= {f"ssl_{name}": value for name, value in (ssl if isinstance(ssl, dict) else {}).items()}
    if mode in ("VERIFY_CA", "VERIFY_IDENTITY"):
        options |= {"ssl_verify_cert": True, "ssl_verify_identity": mode == "VERIFY_IDENTITY"}
    host = given.get("host") or "localhost"
    login = ":".join(quote(str(part), safe="") for part in (given.get("user"), given.get("password")) if part)
    place = f"{login}@{f'[{host}]' if ':' in host else quote(host)}:{given.get('port') or 3306}"
    query = urlencode({name: str(value) for name, value in options.items()}, quote_via=quote)
    return f"mysql://{place}/{quote(str(given.get('database', '')), safe='')}?{query}"


_URLS = {"sqlite": _sqlite_url, "postgresql": _postgres_url, "mysql": _mysql_url}
"""By Django's name of the database: the URL of the one with this alias."""


def _scope(given: dict[str, Any]) -> Any:
    scope = given.get("SCOPE")
    if isinstance(scope, SingleTenant) or scope == "SINGLE_TENANT":
        return SINGLE_TENANT
    if scope is None:
        raise Wrong(
            5,
            "ONCEKEY['SCOPE'] is missing: without it, a stored response would go to every client that knows the key",
            "Write the dotted path of a function that takes the request and returns the tenant, such as "
            "str(request.user.pk), and raises oncekey.NotAuthenticated if request.user.is_authenticated is false; or "
            '"SINGLE_TENANT" if all clients are one',
        )
    return _function("SCOPE", scope)


def _function(name: str, given: Any) -> Callable[..., Any]:
    hint = f'Write the dotted path of a function: ONCEKEY = {{"{name}": "shop.api.function"}}'
    found = given
    if isinstance(given, str):
        try:
            found = import_string(given)
        except ImportError as error:
            raise Wrong(5, f"ONCEKEY[{name!r}] is {given!r}, which cannot be imported: {error}", hint) from error
    if not callable(found):
        raise Wrong(5, f"ONCEKEY[{name!r}] is {given!r}, which is not a function", hint)
    function: Callable[..., Any] = found
    return function


def _policy(name: str, given: Any) -> Policy:
    if isinstance(given, Policy):
        return given
    hint = 'Write the options of a Policy, such as {"effects": "transactional"}; docs/policy.md lists them'
    if not isinstance(given, dict):
        raise Wrong(6, f"{name} is {given!r}", hint)
    try:
        return Policy(**given)
    except (TypeError, ConfigurationError) as error:
        raise Wrong(6, f"{name} is wrong: {error}", hint) from error


class LazyOnce:
    """``once``: the OnceKey of the settings, made when it is first needed. It has the same methods."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: OnceKey | None = None
        self._declared: list[Callable[[OnceKey], Any]] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A OnceKey for ``isinstance``: ``oncekey upkeep oncekey.web.django:once`` takes it, too."""
        return OnceKey

    def get(self) -> OnceKey:
        """The OnceKey itself."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    made = make()
                    for declare in self._declared:
                        declare(made)
                    self._made = made
        return self._made

    def reset(self) -> None:
        """Close the OnceKey, and make a new one of the settings at the next use: for tests."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()

    def policy(self, *given: Policy | None, **options: Any) -> Callable[[Any], Any]:
        """As :meth:`OnceKey.policy`. A wrong option raises here, at the view."""
        chosen = chosen_policy(given, options, Policy()) if given or options else None
        arguments = (chosen,) if given or options else ()

        def declare(view: Any) -> Any:
            self._later(lambda once: once.policy(*arguments)(view))
            return view

        return declare

    def exempt(self, view: Any) -> Any:
        """As :meth:`OnceKey.exempt`."""
        self._later(lambda once: once.exempt(view))
        return view

    def resolver(self, *operations: str) -> Callable[[Any], Any]:
        """As :meth:`OnceKey.resolver`."""

        def register(function: Any) -> Any:
            self._later(lambda once: once.resolver(*operations)(function))
            return function

        return register

    def resume(self, operation: str, function: Any = None, *, policy: Policy | None = None) -> Any:
        """As :meth:`OnceKey.resume`."""
        if function is None:
            return lambda function: self.resume(operation, function, policy=policy)
        self._later(lambda once: once.resume(operation, function, policy=policy))
        return function

    def function(self, name: str, **options: Any) -> Callable[[Callable[_P, _R]], OnceFunction[_P, _R]]:
        """As :meth:`OnceKey.function`. The store is that of the first call, not of the import: a task that a test calls
        keeps its key in the test database."""
        from oncekey.web.django import lazy_functions

        return lazy_functions.decorator(self.get, self._later, name, options)

    def _later(self, declare: Callable[[OnceKey], Any]) -> None:
        with self._lock:
            self._declared.append(declare)
            if self._made is not None:
                declare(self._made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)


once = LazyOnce()
