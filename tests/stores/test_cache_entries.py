"""Entries of the cache: what opens, and what is a miss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import FINAL, Effects, State
from oncekey.errors import ConfigurationError
from oncekey.stores.cache.entries import SKEW_SECONDS, Entries, NotSealed, cacheable, name_of, secret_of

NOW = 1_800_000_000.0
ENTRIES = Entries(secret_of("a secret of sixteen bytes or more"), ttl=60.0)
RESPONSE = StoredResponse(201, (("content-type", "application/json"), ("etag", '"1"')), b'{"id":1}')


def final(**changes: object) -> Record:
    wanted = Reservation("tenant", "k-1", "POST /payments", b"\x01" * 32, 2, Effects.EXTERNAL, "owner", 30.0, 3600.0)
    done = replace(wanted.record(NOW), state=State.COMPLETED, response=RESPONSE, finished_at=NOW)
    return replace(done, **changes)  # type: ignore[arg-type]


NAME = name_of("a database", "tenant", "k-1")


def sealed(record: Record, name: bytes = NAME) -> bytes:
    entry = ENTRIES.seal(name, record, NOW)
    assert entry is not None
    return entry


@given(
    st.builds(
        final,
        scope=st.text(max_size=20).filter(str.isprintable),
        key=st.text(min_size=1, max_size=20).filter(str.isprintable),
        fingerprint=st.binary(min_size=32, max_size=32),
        state=st.sampled_from(sorted(FINAL)),
        attempt=st.integers(1, 9),
        recovery_point=st.none() | st.just("charged"),
        last_error=st.none() | st.just("declined"),
        fingerprint_recipe=st.none() | st.just("method path"),
        quarantine_seconds=st.none() | st.floats(0.0, 1e6),
        response=st.builds(
            StoredResponse, st.integers(200, 499), st.just((("x-a", "é"),)), st.none() | st.binary(max_size=200)
        ),
    )
)
def test_entry_opens_as_the_row_that_was_sealed(record: Record) -> None:
    assert ENTRIES.open(NAME, record.scope, record.key, sealed(record), NOW) == record


def test_time_of_the_row_goes_on_while_it_is_in_the_cache() -> None:
    opened = ENTRIES.open(NAME, "tenant", "k-1", sealed(final()), NOW + 7)
    assert opened is not None
    assert opened.now == NOW + 7


def test_entry_that_was_moved_to_another_key_scope_or_database_does_not_open() -> None:
    entry = sealed(final())
    others = ("a database", "tenant", "k-2"), ("a database", "other", "k-1"), ("another database", "tenant", "k-1")
    for place in others:
        with pytest.raises(NotSealed):
            ENTRIES.open(name_of(*place), "tenant", "k-1", entry, NOW)


def test_scope_and_key_cannot_be_shifted_into_each_other() -> None:
    assert name_of("d", "ab", "c") != name_of("d", "a", "bc")
    assert name_of("d", "ab", "c") != name_of("da", "b", "c")


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_entry_with_one_byte_changed_does_not_open(place: int, change: int) -> None:
    entry = bytearray(sealed(final()))
    entry[place % len(entry)] ^= change
    with pytest.raises(NotSealed):
        ENTRIES.open(NAME, "tenant", "k-1", bytes(entry), NOW)


@given(st.binary(max_size=100))
def test_bytes_that_are_no_entry_do_not_open(found: bytes) -> None:
    with pytest.raises(NotSealed):
        ENTRIES.open(NAME, "tenant", "k-1", found, NOW)


def test_entry_of_another_secret_does_not_open() -> None:
    entry = Entries(secret_of("another secret of sixteen bytes"), 60.0).seal(NAME, final(), NOW)
    assert entry is not None
    with pytest.raises(NotSealed):
        ENTRIES.open(NAME, "tenant", "k-1", entry, NOW)


@pytest.mark.parametrize(
    ("age", "opens"), [(0.0, True), (60.0, True), (60.1, False), (-SKEW_SECONDS, True), (-SKEW_SECONDS - 1, False)]
)
def test_entry_counts_for_its_time_to_live_even_if_the_cache_keeps_it_longer(age: float, opens: bool) -> None:
    assert (ENTRIES.open(NAME, "tenant", "k-1", sealed(final()), NOW + age) is not None) == opens


def test_entry_of_a_row_that_has_expired_does_not_open() -> None:
    assert ENTRIES.open(NAME, "tenant", "k-1", sealed(final(expires_at=NOW + 10)), NOW + 11) is None


@pytest.mark.parametrize("state", sorted(set(State) - FINAL))
def test_row_that_is_not_final_is_not_cacheable(state: State) -> None:
    assert not cacheable(final(state=state))


def test_row_past_its_expiry_is_not_cacheable() -> None:
    assert cacheable(final())
    assert not cacheable(final(expires_at=NOW))


def test_text_that_is_not_unicode_makes_no_entry() -> None:
    assert ENTRIES.seal(NAME, final(operation="POST /\udcff"), NOW) is None


def test_short_secret_is_refused_with_a_way_to_make_one() -> None:
    with pytest.raises(ConfigurationError, match="token_hex"):
        secret_of("short")
