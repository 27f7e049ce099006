"""Two ledgers compared: against a plain model, out of memory, and what is said of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.errors import LedgerError
from oncekey.ledger import comparison, sort
from oncekey.ledger.comparison import KEPT, Entry, Kind, compare
from tests.upkeep.large_ledgers import compare_large

OPEN_FILES = Path("/proc/self/fd")


def entry(ident: str, amount: int = 100, currency: str = "EUR", state: str = "paid", extra: Any = None) -> Entry:
    return Entry(ident, amount, currency, state, extra)


def found(report: comparison.Report) -> list[tuple[str, str]]:
    return [(str(finding.kind), finding.id) for finding in report.findings]


def test_every_kind_of_difference_is_reported() -> None:
    """Each id that is not the same on both sides is named, with what is wrong with it and both sides' values."""
    ours = [entry("same"), entry("lost"), entry("dear", 120), entry("coin"), entry("late"), entry("twin", extra=1)]
    theirs = [entry("late", state="open"), entry("coin", 90, "USD"), entry("dear", 100), entry("same"), entry("new")]
    report = compare([*ours, entry("twin", extra=2)], [*theirs, entry("twin"), entry("pair"), entry("pair")])
    assert found(report) == [
        ("missing_here", "new"),
        ("missing_here", "pair"),
        ("missing_there", "lost"),
        ("different", "coin"),
        ("different", "dear"),
        ("different", "late"),
        ("duplicate_here", "twin"),
        ("duplicate_there", "pair"),
    ]
    by_id = {finding.id: finding for finding in report.findings}
    assert [by_id[name].fields for name in ("coin", "dear", "late")] == [
        ("amount", "currency"),
        ("amount",),
        ("state",),
    ]
    assert (by_id["dear"].ours, by_id["dear"].theirs) == ((entry("dear", 120),), (entry("dear", 100),))
    assert sorted(e.extra for e in by_id["twin"].ours) == [1, 2]
    assert (by_id["twin"].rows_ours, by_id["twin"].rows_theirs) == (2, 1)
    assert (report.rows_ours, report.rows_theirs, report.same, report.exit_code) == (7, 8, 1, 1)


def test_the_same_in_another_order_is_the_same() -> None:
    entries = [entry(str(number), number) for number in range(100)]
    report = compare(entries, reversed(entries))
    assert (report.is_same, report.exit_code, report.same, report.findings) == (True, 0, 100, ())
    assert report.as_text() == "ours: 100 rows; theirs: 100 rows; ids that agree: 100\nno differences"


def test_empty_ledgers_are_the_same() -> None:
    assert compare([], []).is_same


def test_an_amount_paid_twice_with_another_value_is_different_too() -> None:
    """A duplicate does not hide that its values are not ours."""
    report = compare([entry("a", 100)], [entry("a", 100), entry("a", 200)])
    assert found(report) == [("different", "a"), ("duplicate_there", "a")]
    assert found(compare([entry("a")], [entry("a"), entry("a")])) == [("duplicate_there", "a")]


def test_ignored_field_may_differ() -> None:
    report = compare([entry("a", state="done")], [entry("a", state="succeeded")], ignore=["state"])
    assert (report.is_same, report.same) == (True, 1)
    report = compare([entry("a", 1, state="done")], [entry("a", 2, state="succeeded")], ignore=["state"])
    assert [finding.fields for finding in report.findings] == [("amount",)]
    with pytest.raises(LedgerError, match="no field 'status'"):
        compare([], [], ignore=["status"])  # type: ignore[list-item]


def test_an_id_a_thousand_times_costs_no_more_than_ten() -> None:
    """One id on very many rows is counted, and a few of its rows are kept."""
    report = compare([entry("a")], (entry("a", number) for number in range(1_000)), rows_in_memory=100)
    (finding,) = report.findings
    assert (finding.kind, finding.rows_theirs, len(finding.theirs)) == (Kind.DUPLICATE_THERE, 1_000, KEPT)


def test_all_are_counted_and_the_first_of_each_kind_kept() -> None:
    """A whole ledger that is missing does not fill the memory, and does not hide the one amount that is wrong."""
    ours = [*(entry(f"{number:04}") for number in range(1_000)), entry("x", 1)]
    report = compare(ours, [entry("x", 2)], limit=3)
    assert dict(report.counts) == {Kind.MISSING_THERE: 1_000, Kind.DIFFERENT: 1}
    assert found(report) == [(str(Kind.MISSING_THERE), f"000{number}") for number in range(3)] + [("different", "x")]
    assert "… and 997 more" in report.as_text()


# ---------------------------------------------------------------- against a model


def model(ours: list[Entry], theirs: list[Entry]) -> set[tuple[str, str]]:
    """The same by dicts, for few rows."""
    said = set()
    for ident in {e.id for e in [*ours, *theirs]}:
        here, there = [e[1:4] for e in ours if e.id == ident], [e[1:4] for e in theirs if e.id == ident]
        said |= {("missing_here", ident)} if not here else set()
        said |= {("missing_there", ident)} if not there else set()
        said |= {("duplicate_here", ident)} if len(here) > 1 else set()
        said |= {("duplicate_there", ident)} if len(there) > 1 else set()
        if here and there and any({e[at] for e in here} != {e[at] for e in there} for at in range(3)):
            said.add(("different", ident))
    return said


texts = st.text(max_size=3) | st.sampled_from(["EUR", "a\nb", "\0", "\udce9", "é"])
entries = st.builds(
    Entry,
    st.sampled_from(["a", "b", "B", "c", "\0", "a\n", "\udce9", "é", "e\u0301", "10", "9"]),
    st.integers(-(2**70), 2**70) | st.integers(0, 2),
    texts,
    st.sampled_from(["paid", "open"]),
    st.none() | texts | st.dictionaries(texts, st.integers()),
)
sides = st.lists(entries, max_size=KEPT)


@given(ours=sides, theirs=sides, rows=st.integers(2, 30), fan_in=st.integers(2, 4))
def test_as_the_model_says_whatever_the_memory(ours: list[Entry], theirs: list[Entry], rows: int, fan_in: int) -> None:
    """Any ids, values and orders; with runs of one row and merges of merges, as with all in memory."""
    before = sort.FAN_IN
    sort.FAN_IN = fan_in
    try:
        report = compare(ours, theirs, rows_in_memory=rows)
    finally:
        sort.FAN_IN = before
    assert set(found(report)) == model(ours, theirs)
    assert len(found(report)) == len(set(found(report)))
    whole = compare(ours, theirs)
    assert (report.counts, report.same, report.rows_ours) == (whole.counts, whole.same, len(ours))
    json.dumps(report.as_json())
    assert report.as_text().isascii() or report.as_text().encode("utf-8")  # a terminal can print it


# ---------------------------------------------------------------- memory and files


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="this system does not list open files")
def test_few_files_are_open_and_none_is_left(tmp_path: Path) -> None:
    """Hundreds of runs are merged a few at a time, in the folder that was given, which is empty again after it."""
    most = 0

    def watched(_: int) -> None:
        nonlocal most
        most = max(most, len(list(OPEN_FILES.iterdir())))

    numbers = list(range(20_000))
    random.Random(1).shuffle(numbers)
    rows = [entry(f"{number:06}") for number in numbers]
    before = len(list(OPEN_FILES.iterdir()))
    report = compare(rows, reversed(rows), rows_in_memory=200, folder=tmp_path, on_progress=watched)
    assert report.same == 20_000
    assert most <= before + 2 * sort.FAN_IN + 2
    assert list(tmp_path.iterdir()) == []


def test_no_file_at_all_when_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort.Sorter, "_write", None)
    assert compare([entry("a")], [entry("a")], folder=tmp_path).is_same


def test_the_folder_is_empty_again_after_an_error(tmp_path: Path) -> None:
    def broken() -> Iterator[Entry]:
        for number in range(1_000):
            yield entry(str(number))
        raise ConnectionError("the provider hung up")

    with pytest.raises(ConnectionError):  # the source's own error, and not one about our temporary folder
        compare(broken(), [], rows_in_memory=100, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="--tmp"):
        compare([], [], folder=tmp_path / "nowhere")


def test_full_disk_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    """A write that fails says where and what to do."""
    code = f"""
import resource, sys
from oncekey.errors import LedgerError
from oncekey.ledger.comparison import Entry, compare
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    compare((Entry(str(n), n, "EUR", "paid") for n in range(10_000)), [], rows_in_memory=100, folder={str(tmp_path)!r})
except LedgerError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"sorting needs room in {tmp_path}, and writing there failed: File too large; ")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("a", 1, "EUR", "paid"), "it is a tuple, not an Entry"),
        (entry("a", 12.5), "ours, entry 2: the amount 12.5 of 'a' is not an integer of minor units"),  # type: ignore[arg-type]
        (entry("a", True), "the amount True"),
        (entry("a", "12"), "the amount '12'"),  # type: ignore[arg-type]
        (entry(""), "the id is empty"),
        (entry(7), "the id 7 is not a string"),  # type: ignore[arg-type]
        (entry("a", currency=None), "the currency None is not a string"),  # type: ignore[arg-type]
        (entry("a", state=None), "the state None is not a string"),  # type: ignore[arg-type]
        (entry("a", extra={"x": object()}), "the extra of 'a' takes plain values"),
    ],
)
def test_invalid_entry_is_refused(wrong: Any, words: str) -> None:
    """Never compared as if it were: 12.5 == 12.50 and True == 1 are how a difference is missed."""
    with pytest.raises(LedgerError, match="entry 2") as said:
        compare([entry("fine"), wrong], [])
    assert words in str(said.value)


def test_report_as_text_escapes_control_characters() -> None:
    """A summary, then a line per finding; control characters of a file do not reach the terminal."""
    ours = [entry("a", 1, extra="line 2"), entry("b\x1b[2J"), entry("d"), entry("d")]
    report = compare(ours, [entry("a", 2), entry("c", -5, "", ""), entry("d")])
    assert report.as_text() == (
        "ours: 4 rows; theirs: 3 rows; ids that agree: 0\n"
        "\nmissing here (theirs has the id, ours has not): 1\n  c  -5\n"
        "\nmissing there (ours has the id, theirs has not): 1\n  b\\x1b[2J  100 EUR paid\n"
        "\ndifferent: 1\n  a  amount: 1 EUR paid (line 2) here, 2 EUR paid there\n"
        "\nduplicate here (ours has the id more than once): 1\n  d  2 rows: 100 EUR paid + 100 EUR paid"
    )


def test_report_as_json_has_every_finding() -> None:
    report = compare([entry("a", 1, extra="line 2")], [entry("a", 2)])
    assert report.as_json() == {
        "same": False,
        "rows": {"ours": 1, "theirs": 1},
        "ids_the_same": 0,
        "counts": {"missing_here": 0, "missing_there": 0, "different": 1, "duplicate_here": 0, "duplicate_there": 0},
        "listed": 1,
        "findings": [
            {
                "kind": "different",
                "id": "a",
                "fields": ["amount"],
                "ours": [{"amount": 1, "currency": "EUR", "state": "paid", "extra": "line 2"}],
                "theirs": [{"amount": 2, "currency": "EUR", "state": "paid"}],
                "rows": {"ours": 1, "theirs": 1},
            }
        ],
    }


def test_hundred_planted_differences_are_found() -> None:
    """Exactly those, with runs on disk. (A million rows on each side: tests/faults.)"""
    assert compare_large(120_000)["kilobytes"] < 200 * 1024
