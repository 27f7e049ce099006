"""What ``oncekey keys re-encrypt`` prints at its end: a table by key, what each key is needed for, and what to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from oncekey.cli.output import moment, table
from oncekey.telemetry.redaction import redact

if TYPE_CHECKING:
    from oncekey.encryption import Keyring
    from oncekey.encryption.report import Report, RowsUnder

COLUMNS = ("KEY", "FOUND", "REWRITTEN", "CHANGED MEANWHILE", "NOT OPENED", "REFUSED", "FINGERPRINTS", "UNTIL")


def left(report: Report, keyring: Keyring) -> set[int]:
    """The keys of values that are left, without keys that are declared lost: no other run can do more about those."""
    return set(report.left) - keyring.lost


def needed(report: Report, keyring: Keyring) -> set[int]:
    """The other entries that must stay in the keyring: of keys that fingerprints were made with, and of lost keys that
    a row or a job is under which has not ended."""
    lost = {key for key in keyring.lost if report.not_opened.needed[key]}
    return (set(report.fingerprints) - {0, report.current}) | lost


def print_summary(report: Report, keyring: Keyring, another: set[int], *, stopped: bool, dry_run: bool) -> None:
    """``another``: the numbers whose values were written by other keys. ``stopped``: the key is not proven."""
    print(f"read {_count(report.rows, 'row')} with {_values(report.found.total())}")
    table(COLUMNS, [_row(report, number) for number in _numbers(report, keyring)])
    if stopped:
        print(_stopped(report, another, dry_run=dry_run))
    if report.changed:
        print("the app changed or held some rows each time: run it again")
    if report.refused:
        print("the store refused some values, which are a little longer when they are encrypted: see its own limits")
    for number in sorted(set(report.lost) - keyring.lost):
        for sentence in _not_opened(number, report, keyring, another):
            print(sentence)
    for number in sorted(keyring.lost):
        print(_declared_lost(report, number))
    for number in sorted({*keyring.ids, *report.fingerprints} - {0, report.current} - keyring.lost):
        print(_old_key(report, keyring, number))
    if not keyring.encrypts:
        print(_state_of_plain(report, keyring))
    elif plain := report.fingerprints.get(0):
        print(_plain_fingerprints(plain))


def _row(report: Report, number: int) -> list[str]:
    name = "not encrypted" if number == 0 else f"{number}, current" if number == report.current else f"{number}"
    counts = (report.found, report.rewritten, report.changed, report.lost, report.refused)
    prints = report.fingerprints.get(number)
    until = "" if prints is None or not prints.until or number in (0, report.current) else moment(prints.until) or ""
    return [name, *(f"{each[number]:,}" for each in counts), f"{prints.rows if prints else 0:,}", until]


def _numbers(report: Report, keyring: Keyring) -> list[int]:
    """The keys of the table: the current one first, and last what is not encrypted."""
    found = {*keyring.ids, *report.found, *report.fingerprints}
    return sorted(found, key=lambda number: (number != report.current, number == 0, number))


# -- a current key that is not proven ------------------------------------------------------------------------------


def _stopped(report: Report, another: set[int], *, dry_run: bool) -> str:
    """Why nothing is written under the current key, and how to go on."""
    number, opened, unopened = report.current, report.opened[report.current], report.unopened
    wrote = report.rewritten.total()
    begin = f"it stopped after {_values(wrote)}" if wrote else "nothing was written"
    begin = "without --dry-run, nothing would be written" if dry_run else begin
    if not unopened:
        return (
            f"{begin}: no value of the app is under key {number} yet, so nothing shows that this is the app's key "
            f"{number}. Let the app answer a request under it, and run this again; or add --trust-key, if you are sure"
        )
    seen = f"{begin}: key {number} opens {opened:,} of the {opened + unopened:,} values that name it"
    if not opened:
        return f"{seen}. What is written under it, the app could not read"
    if number in another:
        means = (
            f"Some were written by another key {number}, so processes of the app have different keyrings. Find out "
            "which is right, and give it to all of them"
        )
    else:
        means = (
            f"The others were changed or moved from another row, or another process has a different key {number}. "
            "Compare the keyrings of all processes"
        )
    then = f"what does not open stays as it is, and all else is written under key {number}"
    return f"{seen}. {means}. If key {number} of this keyring is right, add --trust-key: {then}"


# -- what does not open --------------------------------------------------------------------------------------------


def _not_opened(number: int, report: Report, keyring: Keyring, another: set[int]) -> list[str]:
    sentences = []
    if report.not_opened.needed[number]:
        sentences.append(_needed_and_not_opened(number, report, keyring, another))
    if over := _over(report, number):
        found = f"damaged: {over}" if number == 0 else f"key {number} does not open {over}"
        if number not in {0, *keyring.ids}:
            found = f"key {number} is not in this keyring, and this is under it: {over}"
        sentences.append(f"{found}. No request needs that, and it stays as it is")
    return sentences


def _needed_and_not_opened(number: int, report: Report, keyring: Keyring, another: set[int]) -> str:
    values = _values(report.not_opened.needed[number])
    if number == 0:
        return f"damaged, and left as it is: {values}"
    if number not in keyring.ids:
        return f"key {number} is not in this keyring: {values} cannot be read. Add the key and run it again"
    if number not in another:
        return f"key {number} does not open {values}: changed, or moved from another row or column"
    return (
        f"key {number} of this keyring is not the key {number} that wrote {values}, and does not open them. Look for a "
        "typing error in the key, or for a number that two keys had: put the key back that wrote them, and give "
        "another key a number of its own"
    )


def _over(report: Report, number: int) -> str:
    """The values that do not open and that neither a retry nor a worker needs; empty: there are none."""
    reasons, ended = report.not_opened.reasons[number], report.not_opened.ended[number]
    kinds = [f"{_count(reasons, 'reason')} in the audit"] if reasons else []
    kinds += [f"{_values(ended)} of jobs and rows that have ended"] if ended else []
    return " and ".join(kinds)


# -- which keys are needed -----------------------------------------------------------------------------------------


def _old_key(report: Report, keyring: Keyring, number: int) -> str:
    """Whether an old key can be removed."""
    values = report.left[number]
    prints = report.fingerprints.get(number)
    if not values and prints is None:
        advice = ". Remove it, unless it is your next one" if keyring.encrypts else ""
        return f"key {number} is not needed: nothing is under it{advice}"
    uses = [f"{_values(values)} {'is' if values == 1 else 'are'} under it"] if values else []
    until = ""
    if prints is not None:
        missing = "" if number in keyring.ids else ". It is not in this keyring, so their retries get 503: add it again"
        have = "row has" if prints.rows == 1 else "rows have"
        uses.append(f"{prints.rows:,} {have} a fingerprint that was made with it{_unsettled(prints)}{missing}")
        until = _until(prints)
    return f"key {number} is needed{until}: {', and '.join(uses)}"


def _declared_lost(report: Report, number: int) -> str:
    rows, jobs, over = report.rows_under.get(number), report.not_opened.jobs[number], _over(report, number)
    named = f"key {number} is declared lost, and "
    if rows is None and not report.not_opened.needed[number]:
        if not over:
            return f"{named}nothing is under it: take its entry out of the keyring"
        rest = f"Only this is under it, and can never be read: {over}"
        return f"{named}its entry is not needed: take it out of the keyring. {rest}"
    until, unsettled = ("", "") if rows is None else (_until(rows), _unsettled(rows))
    discard = "see `oncekey dead-letters list`, and discard them"
    of_jobs = f". {_values(jobs)} of jobs can never be read: {discard}" if jobs else ""
    return (
        f"{named}its entry is needed{until}: what is under it stays as it is, and retries of its rows are "
        f"refused{unsettled}{of_jobs}"
    )


def _state_of_plain(report: Report, keyring: Keyring) -> str:
    """Whether a keyring that does not encrypt can be removed."""
    if left(report, keyring) or needed(report, keyring):
        return "this keyring does not encrypt (plain): new values are plain text, and its keys open the others"
    return (
        "no key is needed. This keyring does not encrypt (plain). If every process has it: to switch encryption off, "
        "remove the keyring; to switch it on, take plain out of it"
    )


def _plain_fingerprints(prints: RowsUnder) -> str:
    rows, it = ("1 row has", "it") if prints.rows == 1 else (f"{prints.rows:,} rows have", "them")
    return f"{rows} a fingerprint from before encryption{_until(prints)}: no key is needed for {it}"


def _until(rows: RowsUnder) -> str:
    if not rows.until:
        return ""
    over = ", which is over: the reaper deletes them" if rows.until < time.time() and not rows.unsettled else ""
    return f" {'at least ' if rows.unsettled else ''}until {moment(rows.until)}{over}"


def _unsettled(rows: RowsUnder) -> str:
    if not rows.unsettled:
        return ""
    named = ", ".join(f"{redact(row.key)} ({row.state})" for row in rows.named)
    more = ", …" if rows.unsettled > len(rows.named) else ""
    states = sorted({str(row.state) for row in rows.named})
    look = " and ".join(f"`oncekey keys list --state {state}`" for state in states)
    verb = "is" if rows.unsettled == 1 else "are"
    return f"; {rows.unsettled:,} of them {verb} not final yet: {named}{more}; see {look}"


def _values(number: int) -> str:
    return _count(number, "value")


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


def summary_json(report: Report, another: set[int]) -> dict[str, Any]:
    numbers = sorted({report.current, *report.found, *report.rewritten, *report.left, *report.fingerprints})
    keys = {}
    for number in numbers:
        prints = report.fingerprints.get(number)
        keys[str(number)] = {
            "found": report.found[number],
            "rewritten": report.rewritten[number],
            "changed": report.changed[number],
            "not_opened": report.lost[number],
            "not_opened_reasons": report.not_opened.reasons[number],
            "not_opened_ended": report.not_opened.ended[number],
            "another_secret": number in another,
            "refused": report.refused[number],
            "left": report.left[number],
            "fingerprints": prints.rows if prints else 0,
            "unsettled": prints.unsettled if prints else 0,
            "until": moment(prints.until) if prints and prints.until else None,
        }
    head = {"current": report.current, "current_proven": report.is_proven, "walks": report.walks, "rows": report.rows}
    return {**head, "keys": keys}
