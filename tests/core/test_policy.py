"""A policy that makes no sense is refused in a sentence that names it, and every setting has its reason."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import warnings
from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from oncekey.core import policy as module
from oncekey.core.policy import Policy
from oncekey.core.policy_headers import NEVER_STORED, STORED_HEADERS
from oncekey.core.states import Effects
from oncekey.errors import ConfigurationError

NOTHING = timedelta(0)


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("effects", "internal", "one of external, transactional, phased, repeatable"),
        ("in_flight", "queue", "one of conflict, wait"),
        ("on_server_error", "ignore", "one of auto, retry, replay, unknown"),
        ("key_syntax", "loose", "one of any, strict"),
        ("key_per", "planet", "one of tenant, endpoint"),
        ("key_format", "ulid", "one of None, uuid"),
        ("ttl", NOTHING, "longer than zero"),
        ("lease", NOTHING, "longer than zero"),
        ("lease", timedelta(seconds=-1), "longer than zero"),
        ("wait", NOTHING, "longer than zero"),
        ("retry_after", NOTHING, "longer than zero"),
        ("begin_timeout", NOTHING, "longer than zero"),
        ("quarantine", NOTHING, "longer than zero"),
        ("ttl", timedelta.max, "at most a hundred years"),
        ("quarantine", timedelta(days=40_000), "at most a hundred years"),
        ("max_request_bytes", 0, "at least 1"),
        ("max_response_bytes", 0, "at least 1"),
        ("key_min_length", 0, "at least 1"),
        ("key_max_length", 256, "between key_min_length and 255"),
        ("key_max_length", 0, "between key_min_length and 255"),
        ("lease", timedelta(hours=24), "longer than a lease"),
        ("lease", timedelta(days=2), "longer than a lease"),
        ("stored_headers", frozenset({"Set-Cookie"}), "set-cookie would go to every client"),
        ("stored_headers", frozenset({"location", "AUTHORIZATION"}), "authorization would go to every client"),
        ("stored_headers", frozenset({"location", "l\xefnk"}), "'l\xefnk' is not the name of a header"),
        ("stored_headers", frozenset({"location:"}), "'location:' is not the name of a header"),
        ("fingerprint_headers", "if-match", "not one string"),
        ("fingerprint_headers", ("if match",), "'if match' is not the name of a header"),
        ("fingerprint_headers", ("Idempotency-Key",), "idempotency-key is the key itself"),
        ("fingerprint_headers", ("TraceParent",), "every retry would be refused"),
        ("fingerprint_headers", ("Authorization",), "is a credential"),
        ("fingerprint_headers", ("X-Forwarded-For",), "a retry may take another way"),
        ("fingerprint_headers", ("Content-Type",), "is part of every fingerprint"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting: str, value: object, sentence: str) -> None:
    """The error is a ConfigurationError (and a ValueError) that names the setting and says what would do."""
    values: dict[str, Any] = {setting: value}
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        Policy(**values)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith("Policy(")
    assert f"{setting}=" in str(caught.value)


def test_a_shortest_key_longer_than_the_longest_is_refused() -> None:
    """The two lengths must leave a key that fits."""
    with pytest.raises(ConfigurationError, match="key_max_length"):
        Policy(key_min_length=40, key_max_length=36)
    assert Policy(key_min_length=36, key_max_length=36).key_min_length == 36


@pytest.mark.parametrize("name", sorted(NEVER_STORED))
def test_policy_refuses_to_store_headers_of_the_never_list(name: str) -> None:
    """Each header of the never-list is refused, in any case."""
    with pytest.raises(ConfigurationError, match=name):
        Policy(stored_headers=frozenset({name.upper()}))


def test_under_one_hour_warns_at_the_callers_line() -> None:
    """A short window is allowed and warned about, and the warning points at the line that made the policy."""
    with pytest.warns(UserWarning, match=r"ttl=0:59:59.*under one hour") as caught:
        Policy(ttl=timedelta(minutes=59, seconds=59))
    assert caught[0].filename == __file__


def test_one_hour_and_the_defaults_do_not_warn() -> None:
    """The usual settings are silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Policy()
        Policy(ttl=timedelta(hours=1))


def test_derived_values_are_computed_once() -> None:
    """The hot path gets numbers, an enum, and names in one case, computed once."""
    policy = Policy(
        effects="phased",
        ttl=timedelta(hours=2),
        lease=timedelta(milliseconds=1500),
        begin_timeout=timedelta(seconds=1),
        methods=frozenset({"post", "Put"}),
        stored_headers=frozenset({"Location", "ETag"}),
    )
    assert policy.effects_kind is Effects.PHASED
    assert (policy.retention_seconds, policy.lease_seconds, policy.begin_seconds) == (7200.0, 1.5, 1.0)
    assert policy.methods == {"POST", "PUT"}
    assert policy.stored_headers == {"location", "etag"}
    assert Policy(fingerprint_headers=("If-Match", "Stripe-Account")).fingerprint_headers == (
        "if-match",
        "stripe-account",
    )


def test_a_replaced_policy_derives_anew() -> None:
    """``dataclasses.replace`` gives a checked policy whose derived values follow."""
    policy = replace(Policy(), effects="repeatable", lease=timedelta(seconds=5))
    assert (policy.effects_kind, policy.lease_seconds) == (Effects.REPEATABLE, 5.0)
    with pytest.raises(ConfigurationError, match="max_request_bytes"):
        replace(policy, max_request_bytes=0)


def test_the_defaults_that_are_promises() -> None:
    """The defaults that README and docs/policy.md name."""
    policy = Policy()
    assert (policy.effects, policy.effects_kind) == ("external", Effects.EXTERNAL)
    assert policy.required
    assert policy.ttl == timedelta(hours=24)
    assert policy.methods == {"POST", "PATCH"}
    assert (policy.key_max_length, policy.key_syntax, policy.key_per) == (255, "any", "tenant")
    assert (policy.in_flight, policy.on_server_error) == ("conflict", "auto")
    assert (policy.max_request_bytes, policy.max_response_bytes) == (1024 * 1024, 1024 * 1024)
    assert policy.stored_headers == STORED_HEADERS
    assert not STORED_HEADERS & NEVER_STORED
    assert "location" in STORED_HEADERS


def test_a_policy_cannot_be_changed() -> None:
    """It is shared by all requests."""
    with pytest.raises(FrozenInstanceError):
        Policy().required = False  # type: ignore[misc]


def test_every_choice_is_checked() -> None:
    """Each setting that is one of several names is in the table of choices, so a misspelt one is refused."""
    named = {item.name for item in fields(Policy) if item.init and isinstance(item.default, str)} - {"timestamp_header"}
    assert named <= set(module._CHOICES)


def test_every_setting_has_its_reason_below_it() -> None:
    """Each field that can be set is followed by a string that says why, as the module promises."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Policy").body
    explained: dict[str, str] = {}
    for node, below in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            explained[node.target.id] = str(below.value.value)
    settable = {item.name for item in fields(Policy) if item.init}
    assert set(explained) == settable
    assert all(len(reason.split()) >= 5 for reason in explained.values())


def test_begin_never_waits_longer_than_the_lease() -> None:
    """Who gets the key must not find that its lease is over already."""
    assert Policy(lease=timedelta(seconds=2), begin_timeout=timedelta(seconds=9)).begin_seconds == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttl", 3600),
        ("lease", 30.0),
        ("max_request_bytes", "1"),
        ("max_response_bytes", 1e6),
        ("key_max_length", True),
        ("methods", "POST"),
        ("methods", frozenset()),
        ("stored_headers", "location"),
        ("fingerprint_fields", "amount"),
        ("fingerprint_fields", ()),
    ],
)
def test_values_of_the_wrong_shape_are_refused_by_name(name: str, value: object) -> None:
    """A string where a collection belongs would protect the letters of POST, and nothing else."""
    with pytest.raises(ConfigurationError, match=name):
        Policy(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [item.name for item in fields(Policy) if item.init])
def test_help_shows_each_field_with_its_default_and_reason(name: str) -> None:
    shown = pydoc.plain(pydoc.render_doc(Policy))
    match = re.search(rf"^ \|  {name}: .+ = .+\n \|      (.+)$", shown, re.MULTILINE)
    assert match is not None
    assert len(match[1].split()) > 3
