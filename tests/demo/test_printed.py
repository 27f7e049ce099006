"""The lines that the demo prints to try are honest: sent as they stand, they do what the line above them says."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.demo.process import Demo

pytestmark = pytest.mark.frameworks


def printed(demo: Demo) -> list[httpx.Request]:
    """The curl commands at the start of the demo's output, as requests."""
    found = []
    for command in re.findall(r"^  (curl (?:.*\\\n)*.*)$", demo.log.read_text(), re.MULTILINE):
        words = shlex.split(command.replace("\\\n", " "))
        url = next(word for word in words if word.startswith("http://"))
        headers = dict(value.split(": ", 1) for flag, value in pairwise(words) if flag == "-H")
        body = next((value for flag, value in pairwise(words) if flag == "-d"), None)
        found.append(httpx.Request("POST" if body else "GET", url, headers=headers, content=body))
    return found


@pytest.mark.parametrize(
    ("options", "words", "end"),
    [
        ([], "it resumes", (201, "succeeded")),
        pytest.param(
            ["--no-provider-honours"],
            "until upkeep asks the ledger",
            (201, "succeeded"),
            marks=pytest.mark.faults,
        ),
        pytest.param(["--background"], "until the worker is done", (201, "succeeded"), marks=pytest.mark.faults),
    ],
    ids=["now", "careless", "background"],
)
def test_printed_commands_can_be_run(tmp_path: Path, options: list[str], words: str, end: tuple[int, str]) -> None:
    with Demo(f"sqlite:///{tmp_path / 'demo.db'}", tmp_path, *options) as demo:
        assert words in demo.log.read_text()
        pay, crash, look = printed(demo)
        for _ in range(2):
            assert demo.http.send(pay).status_code == (202 if options == ["--background"] else 201)

        def ended() -> bool:
            try:
                answer = demo.http.send(crash)
            except httpx.TransportError:
                return False
            return (answer.status_code, end[1] in answer.text) == (end[0], True)

        demo.until(ended, "the crash did not end as it was said")
        seen = demo.http.send(look)
        if options == ["--background"]:
            assert (seen.status_code, end[1] in seen.text) == (end[0], True)
        demo.until(lambda: len(demo.charges(1200)) == 1, "the first one was not charged")
        assert len(demo.charges(900)) == 1


def test_second_start_prints_new_keys_and_shows_409_again(tmp_path: Path) -> None:
    """The keys of the first start have their answers in the database, and would replay them."""
    demo = Demo(f"sqlite:///{tmp_path / 'demo.db'}", tmp_path, "--no-provider-honours")
    keys = []
    for _ in range(2):
        demo.log.unlink(missing_ok=True)
        with demo:
            _, crash, _ = printed(demo)
            keys.append(crash.headers["idempotency-key"])

            def unknown(crash: httpx.Request = crash) -> bool:
                try:
                    answer = demo.http.send(crash)
                except httpx.TransportError:
                    return False
                # The reconciler may settle it between two of our requests: then the log has it.
                seen = answer.status_code == 409 and "outcome-unknown" in answer.text
                return seen or "Doubted" in demo.log.read_text()

            demo.until(unknown, "the retry was never refused with 409 outcome-unknown")
        demo.http = httpx.Client(base_url=demo.url, timeout=30)
    demo.http.close()
    assert len(set(keys)) == 2
