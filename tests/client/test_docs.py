"""The examples of docs/client.md, run as they stand there."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.client import KeyJar
from oncekey.client.decisions import TABLE, Act, Kind, Seen
from tests.cli.key_table import runner
from tests.client.server import Asked, Reply, Server, serving

PAGE = (Path(__file__).parents[2] / "docs/client.md").read_text("utf-8")
README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
OURS, OTHERS = PAGE.split("\n# Other clients of your API\n")


def example(word: str) -> dict[str, Any]:
    """What the example with this word defines."""
    source = next(one for one in re.findall(r"^```python\n(.*?)^```", OTHERS, re.MULTILINE | re.DOTALL) if word in one)
    names: dict[str, Any] = {"__name__": "example_of_the_docs"}
    exec(compile(source, "docs/client.md", "exec"), names)
    return names


class Payments(Server):
    """Answers with what it was sent."""

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        return Reply(201, asked.body, (("Content-Type", "application/json"),))


def test_examples_of_the_client_run_in_the_order_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example_of_the_docs"}
    with serving(Payments(Reply())) as server:
        for source in re.findall(r"^```python\n(.*?)^```", OURS, re.MULTILINE | re.DOTALL):
            code = source.replace("https://api.example.com", server.url).replace("Bearer …", "Bearer s3cret")
            exec(compile(code, "docs/client.md", "exec"), names)
            if "def pay" in source:
                assert asyncio.run(names["pay"]()) == 500
        assert capsys.readouterr().out == "201 {'amount': 500}\n"
        assert [json.loads(asked.body)["amount"] for asked in server.asked] == [500, 500, 500, 700, 900]
        assert len({asked.key for asked in server.asked}) == 5
        for name in ("client", "hourly", "patient", "shop", "http", "session"):
            names[name].close()
        names["db"].close()
        names["jar"].close()
        asyncio.run(names["async_http"].aclose())


def test_example_of_the_readme_is_that_of_the_page() -> None:
    (shown,) = [
        one for one in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "client.intent" in one
    ]
    assert shown in OURS


def test_commands_of_the_page_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = runner("", monkeypatch, capsys)
    monkeypatch.setenv("API_AUTHORIZATION", "Bearer s3cret")
    with serving(Payments(Reply())) as server:
        jar = KeyJar("sqlite:///intents.db")
        jar.prepare("order-42", "POST", f"{server.url}/payments", json={"amount": 500})
        jar.close()
        lines = re.search(r"^\$ cat requests.ndjson\n(.*?)^\$", OURS, re.MULTILINE | re.DOTALL)
        assert lines is not None
        Path("requests.ndjson").write_text(lines[1])
        shown = re.findall(
            r"^\$ oncekey ((?:send|client)[^\n]* --to [^\n]*)\n(.*?)^```", OURS, re.MULTILINE | re.DOTALL
        )
        assert len(shown) == 2
        for command, printed in shown:
            code, out, error = run(*shlex.split(command.replace("https://api.example.com", server.url)))
            assert (code, out, error) == (0, printed, "")
        assert server.asked[0].headers["authorization"] == "Bearer s3cret"
        answers = [json.loads(line) for line in Path("answers.ndjson").read_text().splitlines()]
        assert [(each["intent"], each["json"]) for each in answers] == [
            ("order-1", {"amount": 500}),
            ("order-2", {"amount": 700}),
        ]


ROWS_OF_THE_PAGE = {
    "no connection": {Seen.NOT_CONNECTED},
    "connection lost, timeout": {Seen.LOST, Seen.TIMED_OUT},
    str(Seen.TRY_LATER): {Seen.TRY_LATER},
    "the same, with `Idempotency-Replayed: true`": {Seen.REPLAYED},
    "400 of type `body-incomplete`": {Seen.INCOMPLETE},
    "400 of type `key-malformed`": {Seen.KEY_REFUSED},
    "409 in flight, 202 not done yet": {Seen.IN_FLIGHT, Seen.ACCEPTED},
    "409, outcome unknown": {Seen.UNKNOWN},
    "307, 308 to the same origin": {Seen.SAME_ORIGIN},
    "307, 308 to another origin": {Seen.OTHER_ORIGIN},
}
WORDS_OF_THE_PAGE = {
    Act.AGAIN: "again",
    Act.ASK: "asks again",
    Act.FOLLOW: "follows, with the key",
    Act.SPELL: "once more, in the other spelling",
    Act.RETURN: "\u2013",
    Act.UNSETTLED: "`OutcomeUnsettled`, with `key` and `reference`",
    Act.REFUSE: "`RedirectRefused`",
}


def test_table_of_the_page_is_that_of_the_code() -> None:
    """A row of the code that does more than hand back is on the page."""
    rows = OURS.split("## When it tries again\n")[1].strip().split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    shown = {cell[0].partition(": ")[0] if "of type" in cell[0] else cell[0]: tuple(cell[1:]) for cell in cells}
    assert shown.keys() == {*ROWS_OF_THE_PAGE, "every other answer"}
    others = set(Seen).difference(*ROWS_OF_THE_PAGE.values())
    for name, kinds in (ROWS_OF_THE_PAGE | {"every other answer": others}).items():
        for seen in kinds:
            assert shown[name] == tuple(WORDS_OF_THE_PAGE[TABLE[seen].act(kind)] for kind in Kind), seen


async def test_optional_key_protects_only_requests_that_carry_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = example("required=False")
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as client:

        async def ask(path: str = "/orders", **headers: str) -> httpx.Response:
            return await client.post(path, headers=headers, json={"item": "tea"})

        first, again = await ask(**{"Idempotency-Key": "k-1"}), await ask(**{"Idempotency-Key": "k-1"})
        assert (first.status_code, again.headers["idempotency-replayed"]) == (201, "true")
        bare = [await ask() for _ in range(2)]
        assert [one.status_code for one in bare] == [201, 201]
        assert all("idempotency-replayed" not in one.headers for one in bare)
        assert (await ask(**{"Idempotency-Key": ""})).status_code == 400
        assert (await ask("/others")).status_code == 400
    await names["once"].aclose()


async def test_duplicate_waits_for_the_first_under_the_stripe_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = example('profile="stripe"')
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as client:
        headers = {"Idempotency-Key": "k-1"}
        answers = await asyncio.gather(
            *(client.post("/charges", headers=headers, json={"amount": 5}) for _ in range(5))
        )
        assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"charged":5}')}
        mismatch = await client.post("/charges", headers=headers, json={"amount": 6})
        assert mismatch.headers["stripe-should-retry"] == "false"
    await names["once"].aclose()
