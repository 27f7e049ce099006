"""Ledgers in files: what is read, and that no line is ever left out or guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncekey.errors import LedgerError
from oncekey.ledger import files
from oncekey.ledger.comparison import Entry
from oncekey.ledger.files import Columns, LedgerFile

HEAD = "id,amount,currency,state\n"


def read(folder: Path, name: str, content: str | bytes, columns: Columns | None = None, **options: Any) -> list[Entry]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(LedgerFile(path, columns, **options))


def refused(folder: Path, name: str, content: str | bytes, **options: Any) -> str:
    with pytest.raises(LedgerError) as said:
        read(folder, name, content, **options)
    assert str(said.value).startswith(str(folder / name))
    return str(said.value).removeprefix(str(folder / name))


def test_csv_is_read_in_every_usual_form(tmp_path: Path) -> None:
    """Columns in any order, others beside them, quotes, line breaks in quotes, a byte order mark, empty lines."""
    content = 'state,note,id,amount,currency\r\npaid,"a\nb",x-1,1234,EUR\r\n\r\n"open, late",,"x ""2""",-5,usd\r\n'
    assert read(tmp_path, "a.csv", b"\xef\xbb\xbf" + content.encode()) == [
        Entry("x-1", 1234, "EUR", "paid", "line 2"),
        Entry('x "2"', -5, "USD", "open, late", "line 5"),
    ]


def test_other_delimiters_are_read(tmp_path: Path) -> None:
    one = [Entry("x", 1, "EUR", "paid", "line 2")]
    assert read(tmp_path, "a.tsv", "id\tamount\tcurrency\tstate\nx\t1\tEUR\tpaid\n") == one
    assert read(tmp_path, "a.csv", "id;amount;currency;state\nx;1;EUR;paid\n", delimiter=";") == one


def test_json_lines_are_read_in_every_usual_form(tmp_path: Path) -> None:
    """Members in any order, numbers as ids, integers of any size, no line break at the end."""
    content = (
        '{"id":"x","amount":1,"currency":"eur","state":"paid","more":{}}\n'
        "\n"
        f'{{"state":"open","id":7,"amount":{2**70},"currency":"EUR"}}\n'
        '{"id":"z","amount":"12","currency":"EUR","state":"paid"}'
    )
    assert read(tmp_path, "a.jsonl", content) == [
        Entry("x", 1, "EUR", "paid", "line 1"),
        Entry("7", 2**70, "EUR", "open", "line 3"),
        Entry("z", 12, "EUR", "paid", "line 4"),
    ]


def test_columns_with_other_names_are_mapped(tmp_path: Path) -> None:
    """Also inside of objects; what the ledger has not stays empty. States in the words of the other side."""
    columns = Columns(id="metadata.key", amount="cents", currency=None, state="status")
    content = '{"metadata":{"key":"k"},"cents":5,"status":"succeeded"}\n{"metadata.key":"l","cents":6,"status":"x"}\n'
    assert read(tmp_path, "a.ndjson", content, columns, states={"succeeded": "paid"}) == [
        Entry("k", 5, "", "paid", "line 1"),
        Entry("l", 6, "", "x", "line 2"),
    ]
    assert read(tmp_path, "a.csv", "k,v\na,1\n", Columns(id="k", amount=None, currency=None, state=None)) == [
        Entry("a", 0, "", "", "line 2")
    ]


@pytest.mark.parametrize(
    ("text", "decimals", "minor"),
    [
        ("12.34", 2, 1234),
        ("-12.34", 2, -1234),
        ("-0.05", 2, -5),
        ("12", 2, 1200),
        ("12.3", 2, 1230),
        ("1000", 0, 1000),
        ("0.000000000000000001", 18, 1),
        ("90071992547409.93", 2, 9007199254740993),  # past what a float can hold
    ],
)
def test_amounts_are_read_exactly(tmp_path: Path, text: str, decimals: int, minor: int) -> None:
    """Exactly, whatever way they are written: in CSV, as a JSON string, as a JSON number."""
    for name, content in [
        ("a.csv", f"{HEAD}x,{text},EUR,paid\n"),
        ("a.jsonl", f'{{"id":"x","amount":"{text}","currency":"EUR","state":"paid"}}\n'),
        ("b.jsonl", f'{{"id":"x","amount":{text},"currency":"EUR","state":"paid"}}\n'),
    ]:
        assert [entry.amount for entry in read(tmp_path, name, content, decimals=decimals)] == [minor]


@pytest.mark.parametrize(
    ("text", "decimals"),
    [
        *((text, 0) for text in ("12.34", "12.0", "1e3", "1_000", "1 000", "+5", " 5", "", "٣", "0x10", "NaN", "€5")),
        *((text, 2) for text in ("12.345", "1,234.50", "1.000", "1e3", "12.", ".5", "--5", "", "Infinity")),
        ("9" * 61, 0),
    ],
)
def test_malformed_amount_is_refused(tmp_path: Path, text: str, decimals: int) -> None:
    """Refused with file and line: no separator is guessed, and nothing is rounded."""
    said = refused(tmp_path, "a.csv", f'{HEAD}x,1,EUR,paid\ny,"{text}",EUR,paid\n', decimals=decimals)
    assert said.startswith(f", line 3: the amount {text!r} is not a ")
    assert ("--decimals 2" in said) == (decimals == 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ": it is empty; the first line must name the columns"),
        ("a,b\nx,1\n", ": the column 'id' is not in its first line; columns there: 'a', 'b'"),
        ("id,id,amount,currency,state\n", ": the column 'id' is more than once in its first line"),
        (f"{HEAD}x,1,EUR\n", ", line 2: it has 3 values, and the first line names 4 columns"),
        (f"{HEAD}x,1,EUR,paid,\n", ", line 2: it has 5 values"),
        (f"{HEAD},1,EUR,paid\n", ", line 2: the id is empty"),
        (f'{HEAD}x,1,EUR,"paid\n', ", line 2: it is not CSV"),
        (f'{HEAD}x,1,EUR,paid\n"x"y,1,EUR,paid\n', ", line 3: it is not CSV"),
        (f"{HEAD}x,1,EUR,paid\n".encode() + b"\xff,1,EUR,paid\n", ", line 3: it is not UTF-8"),
        (f"{HEAD}x,1,EUR,{'p' * 2_000}\n", ", line 2: it is longer than 1,000 bytes"),
    ],
)
def test_malformed_csv_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, words: str
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1_000)
    assert refused(tmp_path, "a.csv", content).startswith(words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id":"x"', "it is not JSON"),
        ("[1]", "it is a JSON array"),
        ("null", "it is a JSON null"),
        ('"x"', "it is a JSON string"),
        ("1", "it is a JSON number"),
        ('{"id":"x","currency":"EUR","state":"paid"}', "it has no member 'amount'; members there: 'id', 'currency'"),
        ('{"id":"","amount":1,"currency":"EUR","state":"paid"}', "the id is empty"),
        ('{"id":null,"amount":1,"currency":"EUR","state":"paid"}', "the id is empty (null)"),
        ('{"id":1.5,"amount":1,"currency":"EUR","state":"paid"}', "the id is 1.5"),
        ('{"id":true,"amount":1,"currency":"EUR","state":"paid"}', "the id is True"),
        ('{"id":"x","amount":true,"currency":"EUR","state":"paid"}', "the amount is True"),
        ('{"id":"x","amount":null,"currency":"EUR","state":"paid"}', "the amount is empty (null)"),
        ('{"id":"x","amount":[1],"currency":"EUR","state":"paid"}', "the amount is [1]"),
        ('{"id":"x","amount":12.0,"currency":"EUR","state":"paid"}', "the amount '12.0' is not a whole number"),
        ('{"id":"x","amount":1,"currency":null,"state":"paid"}', "the currency is empty (null)"),
        ('{"id":"x","amount":1,"currency":"EUR","state":3}', "the state is 3"),
        (b'{"id":"\xff","amount":1,"currency":"EUR","state":"paid"}', "it is not JSON"),
        (" " * 2_000, "it is longer than 1,000 bytes"),
    ],
)
def test_malformed_json_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str | bytes, words: str
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1_000)
    fine = b'{"id":"x","amount":1,"currency":"EUR","state":"paid"}\n'
    said = refused(tmp_path, "a.jsonl", fine + (line.encode() if isinstance(line, str) else line) + b"\n")
    assert said.startswith(f", line 2: {words}")


def test_unknown_kind_of_ledger_file_is_refused(tmp_path: Path) -> None:
    """The name says what a file is; options are checked before anything is read."""
    for name, options, words in [
        ("a.json", {}, "jq -c"),
        ("a.xlsx", {}, "must end in .csv, .tsv, .jsonl, .ndjson"),
        ("a.csv", {"decimals": -1}, "decimals must lie between"),
        ("a.csv", {"delimiter": "::"}, "must be one character"),
        ("a.csv", {}, "it cannot be read: No such file"),
    ]:
        with pytest.raises(LedgerError, match=words):
            list(LedgerFile(tmp_path / name, **options))  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="it cannot be read"):
        _ = LedgerFile(tmp_path / "a.csv").size


def test_progress_counts_the_bytes_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEAD + "x,1,EUR,paid\n" * 100_000)
    file = LedgerFile(path)
    assert file.position == 0
    entries = iter(file)
    next(entries)
    assert 0 < file.position < file.size
    assert sum(1 for _ in entries) == 99_999
