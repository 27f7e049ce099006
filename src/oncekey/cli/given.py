"""What an operator gives with ``oncekey keys resolve``: a response, or the result of an effect."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import typer

from oncekey.core.record import StoredResponse
from oncekey.core.responses import NOTHING, written
from oncekey.core.verdicts import Happened
from oncekey.errors import ConfigurationError


def happened_verdict(effect: str | None, result: str | None, provider_id: str | None) -> Happened | None:
    if effect is None:
        if result is not None or provider_id is not None:
            raise typer.BadParameter("--result and --provider-id go with --happened EFFECT and --correct EFFECT")
        return None
    if result is None:
        raise typer.BadParameter("--happened and --correct need --result JSON: what the effect returns to the next try")
    try:
        decoded = orjson.loads(_bytes(result, "--result"))
    except orjson.JSONDecodeError:
        raise typer.BadParameter("--result is not JSON") from None
    return Happened(decoded, effect, provider_id=provider_id)


def given_response(option: str, status: int | None, body: str | None, headers: list[str]) -> StoredResponse:
    if status is None:
        raise typer.BadParameter(f"{option} needs --status: it is what every retry gets")
    named: dict[str, str] = {}
    for line in headers:
        name, colon, text = line.partition(":")
        if not (name.strip() and colon):
            raise typer.BadParameter(f"--header {name}: it takes NAME:VALUE")
        named[name.strip().lower()] = text.strip()
    data = _bytes(body)
    if data and "content-type" not in named:
        try:
            orjson.loads(data)
        except orjson.JSONDecodeError:
            raise typer.BadParameter(
                "--body is not JSON: say what it is, with --header 'Content-Type: text/plain'"
            ) from None
        named["content-type"] = "application/json"
    response = written(option, status, NOTHING, data, named)
    if response.body is None:
        raise ConfigurationError(f"--body: {len(data):,} bytes are more than oncekey keeps; give a shorter one")
    return response


def _bytes(body: str | None, option: str = "--body") -> bytes:
    if body is None or not body.startswith("@"):
        return (body or "").encode()
    if body == "@-":
        return sys.stdin.buffer.read()
    try:
        return Path(body[1:]).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {body}: the file cannot be read ({error.strerror})") from error
