"""The keyring: what it takes, what it says, and what opens with it."""

from __future__ import annotations

import base64
import hmac
import logging
import traceback

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from oncekey.encryption import Keyring, envelope
from oncekey.encryption.keyring import new_key
from oncekey.errors import ConfigurationError
from tests.encryption.rings import ONE, TWO, ring

ROW, COLUMN = ("tenant-1", "key-1"), "response"


def encoded(master: bytes) -> str:
    return base64.b64encode(master).decode()


def test_sealed_content_opens_in_its_row_and_column() -> None:
    keyring = ring(1)
    assert keyring.open(keyring.seal(b"content", ROW, COLUMN), ROW, COLUMN) == b"content"


def test_two_seals_of_the_same_content_share_no_nonce() -> None:
    keyring = ring(1)
    first, second = (keyring.seal(b"content", ROW, COLUMN) for _ in range(2))
    assert first[:10] == second[:10]
    assert first[10:22] != second[10:22]


def test_salt_is_replaced_after_so_many_values_and_all_of_them_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "VALUES_PER_SALT", 3)
    monkeypatch.setattr(envelope, "MAX_CIPHERS", 2)
    keyring = ring(1)
    made = [keyring.seal(b"%d" % number, ROW, COLUMN) for number in range(12)]
    assert [each[2:10] for each in made] == [made[3 * (number // 3)][2:10] for number in range(12)]
    assert len({each[2:10] for each in made}) == 4
    for opening in (keyring, ring(2, 1)):
        assert [opening.open(each, ROW, COLUMN) for each in made] == [b"%d" % number for number in range(12)]


def test_sealed_content_has_the_layout_of_its_version() -> None:
    """Rows outlive versions: computed here by the same primitives, and not by our code."""
    sealed = ring(1).seal(b"content", ROW, COLUMN)
    assert (sealed[0], sealed[1], len(sealed)) == (1, 1, 22 + len(b"content") + 16)
    sub_key = HKDF(algorithm=SHA256(), length=32, salt=b"oncekey", info=b"encryption").derive(ONE)
    cipher = AESGCM(hmac.digest(sub_key, sealed[2:10], "sha256"))
    bound_to = sealed[:10] + b"3;8:tenant-15:key-18:response"
    assert cipher.decrypt(sealed[10:22], sealed[22:], bound_to) == b"content"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (("tenant-1", "key-2"), COLUMN),
        (("tenant-2", "key-1"), COLUMN),
        (("tenant-1", "key-1", "response"), COLUMN),
        (("tenant-1key-1",), COLUMN),
        (("tenant-1",), "key-1"),
        (ROW, "error"),
    ],
)
def test_sealed_content_does_not_open_in_another_row_or_column(row: tuple[str, ...], column: str) -> None:
    keyring = ring(1)
    assert keyring.open(keyring.seal(b"content", ROW, COLUMN), row, column) is None


def test_every_changed_byte_is_noticed() -> None:
    keyring = ring(1, 2)
    sealed = keyring.seal(b"content", ROW, COLUMN)
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 3
        assert keyring.open(bytes(changed), ROW, COLUMN) is None, place
    for length in range(len(sealed)):
        assert keyring.open(sealed[:length], ROW, COLUMN) is None, length


def test_first_key_is_current_and_all_keys_open() -> None:
    old, new = ring(1), ring(2, 1)
    assert (new.current, new.ids) == (2, frozenset({1, 2}))
    assert new.open(old.seal(b"content", ROW, COLUMN), ROW, COLUMN) == b"content"
    assert new.seal(b"content", ROW, COLUMN)[1] == 2
    assert Keyring({1: ONE, 2: TWO}, current=2).current == 2


def test_value_of_a_key_that_is_not_in_the_ring_is_none_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    sealed, keyring = ring(3).seal(b"content", ROW, COLUMN), ring(1)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert keyring.open(sealed, ROW, COLUMN) is None
        assert keyring.open(sealed, ROW, COLUMN) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "key 3, which is not in the keyring" in line


def test_another_key_under_the_same_number_opens_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sealed = Keyring({1: TWO}).seal(b"content", ROW, COLUMN)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert ring(1).open(sealed, ROW, COLUMN) is None
    assert "names key 1 and does not open with it" in caplog.text


def test_mac_depends_on_key_and_content_and_is_none_for_a_lost_key() -> None:
    keyring = ring(1, 2)
    macs = {keyring.mac(1, b"a"), keyring.mac(2, b"a"), keyring.mac(1, b"b")}
    assert len(macs) == 3
    assert all(mac is not None and len(mac) == 32 for mac in macs)
    assert keyring.mac(3, b"a") is None
    assert ring(2, 1).mac(1, b"a") == keyring.mac(1, b"a")


def test_ring_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING", f" 2:{encoded(TWO)} ,\n1:{base64.urlsafe_b64encode(ONE).decode().rstrip('=')}")
    keyring = Keyring.from_env("RING")
    assert (keyring.current, keyring.ids) == (2, frozenset({1, 2}))
    assert keyring.open(ring(1).seal(b"content", ROW, COLUMN), ROW, COLUMN) == b"content"


def test_new_key_is_an_entry_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEKEY_KEYS", new_key(7))
    assert Keyring.from_env().current == 7
    assert new_key(7) != new_key(7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ONCEKEY_KEYS is not set"),
        (encoded(ONE), "entry 1 is not of the form NUMBER:KEY"),
        (f"1:{encoded(ONE)},{encoded(TWO)}", "entry 2 is not of the form NUMBER:KEY"),
        (f"1:{encoded(ONE)},,", "entry 2 is not of the form NUMBER:KEY"),
        (",", "entry 1 is not of the form NUMBER:KEY"),
        (f'"1:{encoded(ONE)}"', "ONCEKEY_KEYS: there is a quotation mark around the value: leave"),
        (f"'1:{encoded(ONE)}'", "ONCEKEY_KEYS: there is a quotation mark around the value: leave"),
        (f"ONCEKEY_KEYS=1:{encoded(ONE)}", "ONCEKEY_KEYS: the value begins with the name of a variable and ="),
        (f"export SHOP_KEYS=1:{encoded(ONE)}", "ONCEKEY_KEYS: the value begins with the name of a variable and ="),
        (f"1:{encoded(ONE)};2:{encoded(TWO)}", "entry 1: its key is not base64"),
        (f"1:{encoded(ONE[:16])}", "entry 1: its key has 16 bytes, and needs 32"),
        (f"0:{encoded(ONE)}", "ONCEKEY_KEYS: entry 1 has the number 0: the numbers of keys are 1 to 120"),
        (f"1:{encoded(ONE)},121:{encoded(TWO)}", "ONCEKEY_KEYS: entry 2 has the number 121: the numbers of keys are"),
        (f"{'9' * 5000}:{encoded(ONE)}", "ONCEKEY_KEYS: entry 1 has a number of 5000 digits"),
        (f"1:{encoded(ONE)},1:{encoded(TWO)}", "two entries have the number 1"),
        (f"1:{encoded(ONE)},2:{encoded(ONE)}", "ONCEKEY_KEYS: the numbers 1 and 2 have the same key"),
    ],
)
def test_malformed_variable_is_refused_without_a_word_of_the_key(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEKEY_KEYS", text)
    with pytest.raises(ConfigurationError) as refused:
        Keyring.from_env()
    assert says in str(refused.value)
    told = "".join(traceback.format_exception(refused.value))
    assert not any(part in told for part in (encoded(ONE)[:12], encoded(TWO)[:12], "\\x01\\x02"))


def test_text_with_a_comma_at_its_end_is_read() -> None:
    assert Keyring.from_text(f"2:{encoded(TWO)}, 1:{encoded(ONE)},\n").ids == {1, 2}


@pytest.mark.parametrize("text", [None, b"1:x", {1: ONE}])
def test_ring_of_something_else_than_a_text_is_refused(text: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"it takes a text, NUMBER:KEY, and got {type(text).__name__}"):
        Keyring.from_text(text)  # type: ignore[arg-type]


def test_mapping_with_one_key_under_two_numbers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="two numbers have the same key"):
        Keyring({1: ONE, 2: ONE})


def test_wrong_mapping_is_refused() -> None:
    for keys in ({}, {1: "text"}, {1: ONE[:31]}, {"1": ONE}, {True: ONE}):
        with pytest.raises(ConfigurationError, match=r"Keyring\(…\)"):
            Keyring(keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no key of this number"):
        Keyring({1: ONE}, current=2)


def test_repr_shows_numbers_only() -> None:
    assert repr(ring(2, 1)) == "Keyring(current=2, ids=[1, 2])"


# -- a ring that does not encrypt, and keys that are lost ------------------------------------------------------------


@pytest.mark.parametrize("word", ["plain", "PLAIN", " plain "])
def test_text_that_begins_with_plain_is_a_ring_that_opens_and_does_not_encrypt(word: str) -> None:
    keyring = Keyring.from_text(f"{word},2:{encoded(TWO)},1:{encoded(ONE)}")
    assert (keyring.encrypts, keyring.current, keyring.ids) == (False, 0, frozenset({1, 2}))
    assert keyring.open(ring(1).seal(b"content", ROW, COLUMN), ROW, COLUMN) == b"content"
    assert repr(keyring) == "Keyring(encrypt=False, ids=[1, 2])"
    assert (ring(1).encrypts, Keyring({1: ONE}, encrypt=False).ids) == (True, frozenset({1}))


def test_lost_key_is_declared_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    for keyring in (Keyring.from_text(f"2:{encoded(TWO)},1:lost"), Keyring({2: TWO}, lost=[1])):
        assert (keyring.current, keyring.ids, keyring.lost) == (2, frozenset({2}), frozenset({1}))
        assert keyring.open(ring(1).seal(b"content", ROW, COLUMN), ROW, COLUMN) is None
        assert repr(keyring) == "Keyring(current=2, ids=[2], lost=[1])"
    assert caplog.text == ""
    assert Keyring.from_text("plain,1:lost").lost == {1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plain", "after plain it needs the keys that open values"),
        ("1:KEY,plain", "entry 2 is plain: it must be the first one"),
        ("plain,plain,1:KEY", "entry 2 is plain: it must be the first one"),
        ("plain:1:KEY", "plain is an entry of its own: plain,NUMBER:KEY"),
        ("plain 1:KEY", "plain is an entry of its own: plain,NUMBER:KEY"),
        ("1:lost", "all its keys are lost, and it needs one that encrypts"),
        ("1:KEY,1:lost", "two entries have the number 1"),
        ("1:lost,1:KEY", "two entries have the number 1"),
        ("1:KEY,121:lost", "the number 121"),
    ],
)
def test_text_with_plain_or_lost_in_a_wrong_place_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Keyring.from_text(text.replace("KEY", encoded(ONE)))


def test_wrong_ring_that_does_not_encrypt_or_lost_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a ring that does not encrypt has none"):
        Keyring({1: ONE}, current=1, encrypt=False)
    with pytest.raises(ConfigurationError, match="has a key of this number, so it is not lost"):
        Keyring({1: ONE}, lost=[1])
    with pytest.raises(ConfigurationError, match="it needs a key"):
        Keyring({}, lost=[1])
    for number in (0, 121, True, "1"):
        with pytest.raises(ConfigurationError, match="the numbers of keys are 1 to 120"):
            Keyring({1: ONE}, lost=[number])  # type: ignore[list-item]
