"""Events: their metrics, their levels, what they never show, and that a broken hook harms no request."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from oncekey.core.record import Record
from oncekey.core.states import Effects, State
from oncekey.errors import ConfigurationError
from oncekey.telemetry import events, redaction
from oncekey.telemetry.emitter import Emitter, log_event
from oncekey.telemetry.events import (
    BreakerClosed,
    BreakerOpened,
    Completed,
    Event,
    JobEvent,
    KeyEvent,
    LeaseLost,
    LeaseRenewed,
    Misused,
    Pruned,
    QueueFull,
    Reserved,
    StoreEvent,
    StoreFailed,
    about,
)
from oncekey.telemetry.redaction import describe, describe_traceback, mask, redact

KEY = "550e8400-e29b-41d4-a716-446655440000"

# What dashboards of the APIs that oncekey was designed for already count.
SEED_METRICS = [
    "api.idempotency.reserve.created.count",
    "api.idempotency.reserve.replay.count",
    "api.idempotency.reserve.in_progress.count",
    "api.idempotency.reserve.key_misuse.count",
    "api.idempotency.reserve.failed_retry.count",
    "api.idempotency.reserve.unknown.count",
    "api.idempotency.store.error.count",
    "api.idempotency.zombie_key.count",
    "api.idempotency.ttl_pruned.count",
    "api.idempotency.reconcile.scheduled.count",
    "api.idempotency.reconcile.resolved.count",
    "api.idempotency.reconcile.failed.count",
]

LEVELS = {
    logging.DEBUG: "Reserved Replayed FoundInFlight Completed Discarded Deferred LeaseRenewed JobStarted JobDone "
    "DutyDone",
    logging.INFO: "Retried TakenOver Pruned ReconcileScheduled ReconcileResolved Failed Released Tombstoned WaitedOut "
    "ReconcileUnasked JobReleased Resumed TurnedAway PersonalKeyFound CallerRefused",
    logging.WARNING: "Misused FoundUnknown ZombieFound ReconcileFailed Doubted LeaseLost JobLeaseLost JobOverran "
    "JobRetried "
    "TimedOut LeaseTooShort EffectLeftOpen FoundUnreadable RanTooLong ResumeFailed",
    logging.ERROR: "StoreFailed BreakerOpened BreakerClosed QueueFull JobDead ReconcileGaveUp DutyFailed ResumeGaveUp",
}

BASES = (Event, KeyEvent, JobEvent, StoreEvent)
KINDS: list[type[Event]] = [
    kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event) and kind not in BASES
]


def make_record() -> Record:
    """A row whose key must not be seen."""
    return Record(
        scope="acme",
        key=KEY,
        operation="POST /payments",
        fingerprint=b"f" * 32,
        fingerprint_version=1,
        effects=Effects.EXTERNAL,
        state=State.IN_PROGRESS,
        attempt=2,
        owner="owner-1",
        lease_until=1060.0,
        recovery_point=None,
        response=None,
        last_error=None,
        reconcile_at=None,
        reconcile_tries=0,
        created_at=1000.0,
        finished_at=None,
        retention_seconds=86400.0,
        expires_at=87400.0,
        now=1001.0,
    )


def make(kind: type[Event]) -> Event:
    """One event of any kind, its fields filled by their types."""
    values = {"str": "text", "int": 3, "float": 1.5, "float | None": 1.5}
    return kind(**{item.name: values[str(item.type)] for item in fields(kind)})


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger ``oncekey``, put back as it was."""
    logger = logging.getLogger("oncekey")
    before = logger.level
    yield logger
    logger.setLevel(before)


def test_every_metric_of_the_seed_exists() -> None:
    """Each of the twelve usual names is on exactly one event, and all others are in the same style."""
    metrics = [kind.metric for kind in KINDS]
    assert len(SEED_METRICS) == 12
    assert set(SEED_METRICS) <= set(metrics)
    assert len(set(metrics)) == len(metrics)
    for metric in metrics:
        assert metric.startswith("api.idempotency.")
        assert metric.endswith(".count")
        assert metric == metric.lower()


def test_every_event_has_the_level_that_fits() -> None:
    """A literal table: the usual is debug, the repaired info, the odd warning, and what is down error."""
    expected = {name: level for level, names in LEVELS.items() for name in names.split()}
    assert {kind.__name__: kind.level for kind in KINDS} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_a_frozen_value_without_a_key(kind: type[Event]) -> None:
    """Frozen, slotted, documented, comparable, and no field holds a key, a body or headers."""
    event = make(kind)
    assert event == make(kind)
    assert not hasattr(event, "__dict__")
    assert kind.__doc__
    assert not kind.__doc__.startswith(kind.__name__), "the docstring is a sentence of ours"
    names = {item.name for item in fields(kind)}
    assert not names & {"key", "body", "headers", "response", "request", "owner"}
    for name in names:
        with pytest.raises(FrozenInstanceError):
            setattr(event, name, "other")
    assert event.amount == (3 if kind in (Pruned, LeaseRenewed, events.TimedOut, StoreFailed) else 1)


def test_an_event_about_a_record_shows_a_hint_of_its_key() -> None:
    """``about`` gives the common fields, in order, with the key redacted."""
    event = Completed(*about(make_record()), status=201)
    assert (event.scope, event.operation, event.attempt, event.status) == ("acme", "POST /payments", 2, 201)
    assert event.key_hint == redact(KEY)
    assert KEY not in repr(event)


def test_redacted_keys_are_distinct_and_unreadable() -> None:
    """At most four characters and a short hash: equal for equal keys only, the same in every process."""
    assert redact(KEY) == "550e~a3a9e1ed"
    assert redact(KEY) == redact(KEY[:])
    assert redact(KEY[:-1] + "1") != redact(KEY)
    assert KEY[4:9] not in redact(KEY)
    assert len(redact("x" * 255)) == 13


@pytest.mark.parametrize("key", ["", "a", "1234", "order-12345"])
def test_of_a_short_key_only_the_hash_is_shown(key: str) -> None:
    """Under twelve characters, four would be too much of it."""
    assert len(key) < 12
    shown = redact(key)
    assert shown.startswith("~")
    assert len(shown) == 9
    assert redact("order-123456").startswith("orde~")


@pytest.mark.parametrize("key", ["a\nb" + "c" * 20, "\ud800" * 20, "\x1b[2J" + "c" * 20])
def test_a_key_cannot_write_to_a_terminal_or_break_the_log(key: str) -> None:
    """What is not printable is not shown, and what cannot be encoded is hashed all the same."""
    assert redact(key).isprintable()
    assert redact(key).startswith("~")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            'duplicate key value violates unique constraint "pk"\nDETAIL: Key (k)=(secret)',
            "unique constraint …",
        ),
        ("Key (scope, key)=(acme, secret) already exists", "Key (scope, key)… already exists"),
        ("invalid input 'sec''ret' here", "invalid input … here"),
        (r'bad value "sec\"ret" here', "bad value … here"),
        ("cannot reach postgresql://user:secret@db/app now", "cannot reach … now"),
        ("connection refused on port 5432", "connection refused on port 5432"),
    ],
)
def test_an_error_is_described_without_values(message: str, shown: str) -> None:
    """The class and what went wrong, not with whose data."""
    text = describe(RuntimeError(message))
    assert text.startswith("RuntimeError: ")
    assert text.endswith(shown)
    assert "secret" not in text
    assert "ret" not in text.removeprefix("RuntimeError").replace("retry", "")


def test_an_error_without_words_is_its_class_and_a_long_one_is_cut() -> None:
    """Whatever was raised, one short line comes out."""
    assert describe(TimeoutError()) == "TimeoutError"
    assert len(describe(RuntimeError("x" * 10_000))) < 250


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_logged_at_its_level(kind: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    """One record on the logger ``oncekey``, named after the event, with the event attached for formatters."""
    with caplog.at_level(logging.DEBUG, logger="oncekey"):
        log_event(make(kind))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("oncekey", kind.level)
    assert record.getMessage().split()[0] == kind.__name__
    assert vars(record)["event"] == make(kind)


def test_a_line_of_the_log_shows_all_fields_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    """``name=value``, quoted where it is not one word."""
    with caplog.at_level(logging.DEBUG, logger="oncekey"):
        log_event(LeaseLost(*about(make_record()), move="complete"))
    assert caplog.messages == [
        "LeaseLost scope=acme key_hint=550e~a3a9e1ed operation='POST /payments' attempt=2 move=complete"
    ]
    assert KEY not in caplog.text


def test_a_path_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A line end in what a client sent is escaped."""
    with caplog.at_level(logging.DEBUG, logger="oncekey"):
        log_event(Misused("acme\nERROR", "~1", "POST /a\nERROR forged", 1))
    (message,) = caplog.messages
    assert "\n" not in message
    assert message.count(r"\n") == 2


def test_nothing_is_logged_below_the_level(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """An app that logs warnings sees the odd, not the usual."""
    logger.setLevel(logging.WARNING)
    log_event(make(Reserved))
    log_event(make(LeaseLost))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_emitter_wants_events_that_a_hook_or_the_log_level_takes(logger: logging.Logger) -> None:
    """With a hook everything; without, what the logger's level lets through, also after it changed."""
    silent = Emitter(None)
    logger.setLevel(logging.WARNING)
    assert not silent.wants(Reserved)
    assert silent.wants(StoreFailed)
    assert Emitter(lambda event: None).wants(Reserved)
    logger.setLevel(logging.DEBUG)
    assert silent.wants(Reserved)


def test_equal_events_are_logged_once_a_minute_and_all_reach_the_hook(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    seen: list[Event] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    emitter = Emitter(seen.append)
    down, full = StoreFailed("reserve", "down"), StoreFailed("reserve", "full")
    for event in (down, down, full, down):
        emitter.emit_paced(event)
    assert [record.event for record in caplog.records] == [down, full]  # type: ignore[attr-defined]
    now[0] += 60.0
    emitter.emit_paced(down)
    assert len(caplog.records) == 3
    assert seen == [down, down, full, down, down]
    for number in range(1_000):  # a store may say something else each time
        emitter.emit_paced(StoreFailed("reserve", f"error {number}"))
    assert len(emitter._silent_until) <= 100


def test_an_emitter_logs_and_calls_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    """Both get the same event, once."""
    seen: list[Event] = []
    event = BreakerOpened("reserve", "StoreUnavailable")
    Emitter(seen.append).emit(event)
    Emitter().emit(BreakerClosed())
    assert seen == [event]
    assert [message.split()[0] for message in caplog.messages] == ["BreakerOpened", "BreakerClosed"]


def test_a_hook_that_raises_is_reported_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The request never notices, every event still reaches the hook, and the log is not flooded."""
    calls: list[Event] = []

    def hook(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("the hook is broken")

    emitter = Emitter(hook)
    for _ in range(3):
        emitter.emit(QueueFull("reserve", "StoreOverloaded"))
    assert len(calls) == 3
    complaints = [record for record in caplog.records if "hook" in record.getMessage()]
    assert len(complaints) == 1
    assert complaints[0].exc_text is not None


def test_a_hook_cannot_swallow_an_interrupt() -> None:
    """Ctrl-C and cancellation are not the hook's failures."""

    def hook(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Emitter(hook).emit(make(Reserved))


# -- what a line of the log shows of an exception ----------------------------------------------------------------------

MESSAGES = {
    "can't read 'a secret' of the user's": "can't read … of the user's",
    "b'a secret' and \"another\"": "… and …",
    "never closed: 'a secret": "never closed: …",
    "Key (a, b)=(1, 2) exists": "Key (a, b)… exists",
    "card 4111 1111 1111 1111 declined": "card … declined",
    "ask ann@example.com, +49 151 1234567": "ask …, …",
    "password=hunter2, session: abc": "… …",
    "Bearer abc is over": "… is over",
    "401 from provider: Authorization: Bearer sk_live_secret": "401 from provider: …",
    "sent Cookie: session=a; csrf=secret": "sent …",
    "Proxy-Authorization: Digest username=ann, response=secret": "Proxy-…",
    "Set-Cookie: sid=secret; Path=/": "Set-…",
    "headers Authorization=Basic abc def": "headers …",
    "asked with Digest username=ann, response=secret": "asked with …",
    "no authorization for this": "no authorization for this",
    "mail 'joe@example.com' password 'a secret'": "mail … password …",
    "no sk_live_4eC39HqLyjWDarjtT1zdp7dc here": "no … here",
    f"no key {KEY}": "no key …",
    "see https://u:p@host/path?x=1 for more": "see … for more",
    "timed out after 30 s, port 5432": "timed out after 30 s, port 5432",
    "relation idempotency_keys is missing": "relation idempotency_keys is missing",
    f"its job {'a1' * 16}: `retry {'2' * 32} --why TEXT`": f"its job {'a1' * 16}: `retry {'2' * 32} --why TEXT`",
    f"its job {'a1' * 17}": "its job …",
}


@pytest.mark.parametrize(("message", "shown"), MESSAGES.items())
def test_value_in_a_message_is_masked_and_words_are_not(message: str, shown: str) -> None:
    assert describe(RuntimeError(message)) == f"RuntimeError: {shown}"


STORED = {
    **{f"RuntimeError: {message}": f"RuntimeError: {shown}" for message, shown in MESSAGES.items()},
    "KeyError: 'a secret'": "KeyError: …",
    "ValueError: no\nDETAIL: a secret": "ValueError: no",
    "asked; it became unknown because: KeyError: 'a secret'": "asked; it became unknown because: KeyError: …",
    "effect 'charge' may have happened": "effect 'charge' may have happened",
    "the handler raised KeyError, answered with 500": "the handler raised KeyError, answered with 500",
    "sent 'joe@example.com' for 'charge'": "sent '…' for 'charge'",
    "sent\nCookie: a=b; c=d\nand 'charge'": "sent\n…\nand 'charge'",
}


@pytest.mark.parametrize(("stored", "shown"), STORED.items())
def test_stored_error_is_masked_as_the_log_masks_it(stored: str, shown: str) -> None:
    """The log has the exception, the commands its text in the row. Quotes of oncekey's own sentences stay."""
    assert mask(stored) == shown


def test_exception_that_cannot_be_printed_is_described_by_its_class() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(Broken()) == "Broken"


def test_traceback_of_a_chain_has_every_class_and_no_message(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        try:
            try:
                raise KeyError(KEY)
            except KeyError as first:
                raise ValueError(KEY) from first
        except ValueError:
            raise ExceptionGroup(f"group {KEY}", [OSError(KEY), TypeError(KEY)])  # noqa: B904 - the context is meant

    try:
        fail()
    except ExceptionGroup:
        logging.getLogger("oncekey").exception("it failed")
    (line,) = caplog.records
    assert (line.exc_info, line.exc_text is None) == (None, False)
    assert KEY not in caplog.text
    positions = [caplog.text.index(word) for word in ("KeyError", "ValueError", "ExceptionGroup", "OSError")]
    assert positions == sorted(positions)
    assert "in fail" in caplog.text


def test_chain_that_is_a_circle_ends() -> None:
    one, two = ValueError(KEY), TypeError(KEY)
    one.__cause__, two.__cause__ = two, one
    assert describe_traceback(one).count("Error") == 2


def test_exception_in_a_message_is_described(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("oncekey")
    logger.warning("it failed (%s) with %d", OSError(f"no {KEY}"), 3)
    logger.warning("it failed (%s)", ConfigurationError("say effects='phased'"))
    assert [line.getMessage() for line in caplog.records] == [
        "it failed (OSError: no …) with 3",
        "it failed (say effects='phased')",
    ]


def test_loggers_of_oncekey_have_the_filter() -> None:
    source = Path(redaction.__file__).parents[1]
    named = {name for file in source.rglob("*.py") for name in re.findall(r'getLogger\("([^"]+)"', file.read_text())}
    assert named == {"oncekey", "oncekey.client"}
    assert all(redaction._FILTER in logging.getLogger(name).filters for name in named)


@pytest.mark.parametrize(
    "unit",
    ["a", "'", '"\\', "=(", "pass", "a@", "a@b.", "1 ", "a1", "bearer ", "a://", " ", "cookie", "cookie:", "digest a"],
)
def test_long_text_is_masked_in_time(unit: str) -> None:
    """A pattern that reads a text as often as it is long would take minutes."""
    text = unit * (300_000 // len(unit))
    begun = time.process_time()
    describe(ValueError(text))
    mask(text)
    assert time.process_time() - begun < 2.0
