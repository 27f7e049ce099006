"""Sends the requests of a file, each once, however often the command is run.

A line of the file is a JSON object: ``json`` or ``text`` is the body, ``path`` is joined to the address, ``method`` is
POST unless it says otherwise, ``headers`` go with it, and ``intent`` is its name. Without a name it is called by the
number of its line, so a line that was sent must stay where it is and as it is: a changed one is refused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, Final

import orjson

from oncekey.client.client import Client
from oncekey.client.resumption import Ended, Outcome, Silence, result_of
from oncekey.core.values import value
from oncekey.errors import ConfigurationError, IntentChanged, JarError

_MEMBERS: Final = frozenset({"intent", "method", "path", "json", "text", "headers"})
_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
REFUSED: Final = "changed"
"""A line that is no longer what was sent under its name."""


@value
class Line:
    """One request of the file."""

    number: int
    name: str
    named: bool
    """It has a name of its own. Otherwise it is called by its place."""
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def read_lines(path: Path, to: str, *, bodies: bool = False) -> Iterator[Line]:
    """The requests of a file. With ``bodies`` a line is the JSON body itself. ConfigurationError names a bad line."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                line = _line(path, number, text, to, bodies)
                if line.name in seen:
                    raise ConfigurationError(f"{path}:{number}: an earlier line has the intent '{line.name}' already")
                seen.add(line.name)
                yield line
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from error


def _line(path: Path, number: int, text: bytes, to: str, bodies: bool) -> Line:
    place = f"{path}:{number}"
    try:
        members = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{place}: not JSON ({error})") from None
    json_type = (("content-type", "application/json"),)
    if bodies:
        return Line(number, f"line {number}", False, "POST", to, json_type, text.strip())
    if not isinstance(members, dict):
        raise ConfigurationError(f"{place}: a JSON object is expected; with --bodies a line may be any JSON")
    if unknown := members.keys() - _MEMBERS:
        raise ConfigurationError(
            f"{place}: unknown {', '.join(sorted(unknown))}; a line has {', '.join(sorted(_MEMBERS))}. If the lines "
            "are the bodies themselves, say --bodies"
        )
    name = members.get("intent", f"line {number}")
    method = members.get("method", "POST")
    if not (isinstance(name, str) and name.strip()):
        raise ConfigurationError(f'{place}: intent is a name, such as "order-42"')
    if method not in _METHODS:
        raise ConfigurationError(f"{place}: method is one of {', '.join(sorted(_METHODS))}")
    if "json" in members and "text" in members:
        raise ConfigurationError(f"{place}: json or text, not both")
    headers = members.get("headers", {})
    if not (isinstance(headers, dict) and all(isinstance(each, str) for each in headers.values())):
        raise ConfigurationError(f"{place}: headers is an object of texts")
    lines = tuple(headers.items())
    body = str(members.get("text", "")).encode()
    if "json" in members:
        body = orjson.dumps(members["json"])
        if not any(header.lower() == "content-type" for header in headers):
            lines += json_type
    at = members.get("path", "")
    if not isinstance(at, str) or at.lower().startswith(("http://", "https://")):
        raise ConfigurationError(f'{place}: path is a path at {to}, such as "/payments"')
    url = f"{to.rstrip('/')}/{at.lstrip('/')}" if at else to
    return Line(number, name, "intent" in members, method, url, lines, body)


class Bulk:
    """Sends lines by several threads. ``on_outcome`` is called in one thread at a time."""

    def __init__(self, client: Client, *, at_once: int, on_outcome: Callable[[Outcome], None]) -> None:
        self._client = client
        self._at_once = at_once
        self._tell = on_outcome
        self._lock = threading.Lock()
        self._silence = Silence()
        self.counts: Counter[str] = Counter()
        self.changed: set[str] = set()
        """Names of lines that are no longer what was sent under them."""

    def refuse_moved(self, path: Path, lines: Iterator[Line]) -> None:
        """ConfigurationError if a line without a name is not what was sent under its number: then lines have moved,
        and one that was sent may now stand under a number that is new, and would be sent twice."""
        for line in lines:
            if not line.named and self._is_changed(line):
                raise ConfigurationError(
                    f"{path}:{line.number}: another request was sent as line {line.number} of this file, so its lines "
                    "have moved or changed, and one that was sent could be sent again. Nothing was sent. Put the lines "
                    'back as they were and add new ones at the end, or give each line a name: "intent": "order-42"'
                )

    def send(self, lines: Iterator[Line]) -> None:
        """JarError ends it: without the jar nothing may be sent. KeyboardInterrupt ends it, too, after the requests
        that are on their way."""
        done = self._client.jar.finished()
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="send") as threads:
            running: set[Future[None]] = set()
            try:
                for line in lines:
                    if line.name in done and not self._is_changed(line):
                        self._add(Outcome(line.name, "", Ended.ANSWERED, done[line.name]), before=True)
                        continue
                    running.add(threads.submit(self._one, line))
                    if len(running) >= 2 * self._at_once:
                        ended, running = wait(running, return_when=FIRST_COMPLETED)
                        for each in ended:
                            each.result()
                for each in running:
                    each.result()
            except KeyboardInterrupt:  # what is on its way ends; what waits for a thread is not sent
                threads.shutdown(cancel_futures=True)
                raise

    def _is_changed(self, line: Line) -> bool:
        found = self._client.jar.read(line.name)
        return found is not None and found.fingerprint != _request(line).fingerprint()

    def _one(self, line: Line) -> None:
        jar = self._client.jar
        with self._lock:
            skipped = self._silence.skipped(line.name, "")
        if skipped is not None:
            self._add(skipped)
            return
        try:
            with self._client.intent(line.name) as intent:
                response = intent.request(line.method, line.url, headers=list(line.headers), content=line.body)
        except JarError:
            raise
        except Exception as error:  # noqa: BLE001 - one line's trouble must not keep the others
            row = jar.read(line.name)
            if row is None or isinstance(error, IntentChanged):
                self.changed.add(line.name)
                self._add(Outcome(line.name, "", Ended.OPEN, note=str(error)), kind=REFUSED)
            else:
                self._add(result_of(jar, row, error=error))
            return
        row = jar.read(line.name)
        if row is not None:
            self._add(result_of(jar, row, status=response.status_code))

    def _add(self, outcome: Outcome, *, before: bool = False, kind: str | None = None) -> None:
        with self._lock:
            self.counts[kind or outcome.ended] += 1
            if kind is None and not before:
                self._silence.note(outcome)
            if outcome.ended is Ended.ANSWERED:
                self.counts["before" if before else "now"] += 1
                self.counts["ok" if (outcome.status or 0) < 400 else "refused"] += 1
            self._tell(outcome)


def write_answers(client: Client, lines: Iterator[Line], out: IO[bytes]) -> None:
    """The answer to each line that has one, in the order of the file."""
    for line in lines:
        row = client.jar.read(line.name)
        if row is not None and row.status is not None:
            out.write(orjson.dumps(_answer(line, row.status, row.answer.body if row.answer else None)) + b"\n")


def _answer(line: Line, status: int, body: bytes | None) -> dict[str, Any]:
    members: dict[str, Any] = {"line": line.number, "intent": line.name, "status": status}
    try:
        return members | {"json": orjson.loads(body or b"")}
    except orjson.JSONDecodeError:
        return members | {"text": None if body is None else body.decode("utf-8", "replace")}


def _request(line: Line) -> Any:
    from oncekey.client.calls import Request

    return Request(line.method, line.url, line.headers, line.body)
