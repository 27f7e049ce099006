"""How logs, events and messages show a key or an error without its secrets (hazard 28).

One mechanism for everything that oncekey logs: a filter of its loggers replaces every exception, in a traceback or in a
message, by what :func:`describe` shows of it. So a line of oncekey cannot show the text of a driver's or an app's
exception as it is, whichever module logs it. The exception itself goes on to the app's own handlers and its server.
"""

from __future__ import annotations

import hashlib
import logging
import re
from traceback import format_tb

from oncekey.core.personal_data import personal_data
from oncekey.errors import OnceKeyError


def redact(key: str) -> str:
    """Show enough to recognise a key, but not the key: its first 4 characters and 8 hex digits of its hash.

    A key shorter than 12 characters shows only the hash: 4 characters would be too large a part of it. So does a key
    that looks like personal data, of which 4 characters are a name or the place of a phone.
    """
    mark = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    start = key[:4] if len(key) >= 12 and personal_data(key) is None else ""
    return f"{start}~{mark}" if start.isprintable() else f"~{mark}"


LONGEST, LONGEST_OF_OURS = 200, 600
"""How much of a message is shown. A sentence of oncekey's own ends with what to do, so it is shown whole."""
_LONGEST_READ = 4_000
_DEEPEST = 20
"""How many exceptions of a chain are shown."""

# A message may quote what a client sent. So each pattern reads a text once: it begins at the start of a word only, or
# reads a bounded part, or ends at the end of the text.
_IN_QUOTES = r"""
      (?<!\w)[bBrRuUxXeE]{0,2}'(?:[^'\\]|\\.|'')*(?:'|\\?$)    # an apostrophe within a word opens no value
    | (?<!\w)[bBrRuUxXeE]{0,2}"(?:[^"\\]|\\.|"")*(?:"|\\?$)
"""
_WORD = r"""[^\s@<>()\[\]{},;:='"]"""
"""A character of an e-mail address, as far as this module looks."""
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_BETWEEN = r"[ ()./-]{0,2}"
"""What phone numbers and card numbers have between their digits."""
_SUSPICIOUS = rf"""
      (?P<ours>\b(?:(?:job|retry)\ [0-9a-f]{{32}}|epoch\ \d-[0-9a-f]{{16}})\b)    # a job's id, the epoch of a store
    | (?<!\S)(?=\S*%[0-9a-f]{{2}})\S+                         # a word with percent-encoding: a value of a URL
    | (?<!\w)\w{{1,30}}://\S+
    | =\s{{0,3}}\([^)]*(?:\)|$)                                  # Key (a, b)=(c, d)
    | (?:authorization|cookie)\w{{0,20}}['"]?\s{{0,3}}[:=][^\n]*    # a header with a credential: the rest of its line
    | (?<!\w)digest\s{{1,3}}\w{{1,20}}=[^\n]*
    | (?<!\w)(?:bearer|basic|digest)\s{{1,3}}\S+
    | (?:pass|pwd|secret|token|credential|signature|session|api[_-]?key)
      \w{{0,20}}\s{{0,3}}[:=]\s{{0,3}}\S+
    | (?<!{_WORD})(?:{_WORD}{{1,60}}'{_WORD}*|{_WORD}+)@{_WORD}{{1,200}}\.\w+    # an e-mail address
    | (?<![\w-])e[wy][\w-]+(?:\.[\w-]*){{2,4}}                 # a JWT: its first part is an object of JSON
      # Seven digits or more: a phone, a card, an account. Not an IPv4 address.
    | (?<!\d)(?<!\d\.)(?!{_OCTET}(?:\.{_OCTET}){{3}}(?!\.?\d))(?=[+(]{{0,3}}\d(?:{_BETWEEN}\d){{6}})
      \+?(?:\((?=[^()]{{1,6}}\)))?\+?\d(?:{_BETWEEN}\d)*
    | (?<![\w+/=-])(?=[A-Za-z_+/=-]*\d)(?=[\d_+/=-]*[A-Za-z])[\w+/=-]{{16,}}    # letters and digits: a token, a UUID
"""
_SECRETS = re.compile(_SUSPICIOUS, re.VERBOSE | re.IGNORECASE)
_VALUES = re.compile(f"{_IN_QUOTES}|{_SUSPICIOUS}", re.VERBOSE | re.IGNORECASE)
"""Where messages of databases, drivers and apps have values, and what looks like a secret."""

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
"""What a terminal obeys, and what makes `grep` take a log for a binary file."""


_RAISED = re.compile(r"(?:^|because: )(?=[^\W\d]\w*: )")
"""Where a stored error has an exception, ``ValueError: its message``: at its start, or as the cause of an unknown key
(``core/doubts.py``)."""


def mask(text: str) -> str:
    """A stored error with ``…`` for everything that looks like a secret. Of the message of an exception it has what
    :func:`describe` shows. In other words quotes stay: oncekey's own sentences have the names of steps and settings
    there."""
    raised = _RAISED.search(text)
    if raised is None:
        return _SECRETS.sub(_masked, text)
    before, error = text[: raised.end()], text[raised.end() :]
    return f"{_SECRETS.sub(_masked, before)}{_without_values(error, LONGEST_OF_OURS)}"


def _without_values(text: str, longest: int) -> str:
    """The first line of a message, with ``…`` for every value. Later lines are left out, because they quote the row."""
    lines = text.splitlines()
    return _VALUES.sub(_masked, _CONTROLS.sub("…", lines[0][:_LONGEST_READ]))[:longest] if lines else ""


def _masked(found: re.Match[str]) -> str:
    return found["ours"] or "…"


def describe(error: BaseException) -> str:
    """The class and the first line of the message, with ``…`` for every value."""
    message = _without_values(_message(error), LONGEST_OF_OURS if isinstance(error, OnceKeyError) else LONGEST)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of the app may fail to describe itself
        return ""


def describe_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, with what :func:`describe` shows in place of each message."""
    shown = [_described(error)]
    seen = {id(error)}
    while len(shown) < _DEEPEST:
        cause = error.__cause__
        before = cause or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            break
        word = "This caused the next one:" if cause is not None else "While it was handled, the next one was raised:"
        shown.append(f"{_described(before)}\n\n{word}\n")
        seen.add(id(before))
        error = before
    return "\n".join(reversed(shown))


def _described(error: BaseException) -> str:
    frames = format_tb(error.__traceback__)
    lines = ["Traceback (most recent call last):\n", *frames] if frames else []
    lines.append(describe(error))
    if isinstance(error, BaseExceptionGroup):
        lines += [f"\n  {describe(each)}" for each in error.exceptions[:_DEEPEST]]
    return "".join(lines)


class _Redacting(logging.Filter):
    """Lets every record pass, and takes the exceptions out of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            error = record.exc_info[1]
            record.exc_info = None
            record.exc_text = None if error is None else describe_traceback(error)
        if isinstance(record.args, tuple):
            record.args = tuple(_shown(each) for each in record.args)
        return True


def _shown(argument: object) -> object:
    """A sentence of oncekey's own is written without secrets; every other exception is described."""
    foreign = isinstance(argument, BaseException) and not isinstance(argument, OnceKeyError)
    return describe(argument) if foreign else argument  # type: ignore[arg-type]


_FILTER = _Redacting("oncekey")


def _install(logger: logging.Logger) -> None:
    """Once, also if this module is loaded again."""
    for each in [each for each in logger.filters if type(each).__name__ == _Redacting.__name__]:
        logger.removeFilter(each)
    logger.addFilter(_FILTER)


for _name in ("oncekey", "oncekey.client"):  # all of them: a logger's filter does not hold for the loggers below it
    _install(logging.getLogger(_name))
