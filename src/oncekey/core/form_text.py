"""Form text (`a=1&b=2`, a query or a body of application/x-www-form-urlencoded) in the order of its names.

Clients may write the same form in another order: keyword arguments, a dictionary, a sorted signature. `in_order` gives
one text for all such spellings, or None: "hash the bytes". The order of values under one name counts (`a=1&a=2` is not
`a=2&a=1`), and so does the percent-encoding.

Two texts that any server could read as different must stay different. Hence:

* Names are compared decoded, so that `ab=1&a%62=2`, two values of one name, keeps its order. They must be visible ASCII
  without a percent sign: many servers read all bytes that are not UTF-8 as one replacement character.
* Pairs are sorted by the part of the name before the first `[` or `.`: a server may read `item[]=1&item[x]=2` as one
  list.
* Only plain `name=value&name=value` is accepted. Refused are: no `=`, an empty name or pair, a bad escape, control
  characters, bytes past ASCII, and `;`, which some servers read as `&`.

A refusal is no error: the caller hashes the raw bytes; at worst a retry in another order is a mismatch.
"""

from __future__ import annotations

import re

__all__ = ["MAX_PAIRS", "in_order"]

# Servers stop at about 1,000 fields. A text with more is hashed as bytes, which costs nothing per pair.
MAX_PAIRS = 1000

# Visible ASCII without the delimiters: % (an escape must be whole), & = + ; and # (where a URL ends). Possessive, so
# that matching takes linear time.
_NAME = rb"(?:[!-\"$'-*,-:<>-~]++|%[0-9A-Fa-f]{2})++"
_VALUE = rb"(?:[!-\"$'-:<-~]++|%[0-9A-Fa-f]{2})*+"
_FORM_TEXT = re.compile(rb"%b=%b(?:&%b=%b)++" % (_NAME, _VALUE, _NAME, _VALUE)).fullmatch
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_VISIBLE = re.compile(rb"[!-$&-~]++").fullmatch


def in_order(text: bytes) -> bytes | None:
    """Return the pairs of `text` in the order of their names; None if it is not plain form text, or has one pair."""
    if not 0 < text.count(b"&") < MAX_PAIRS or not _FORM_TEXT(text):
        return None
    pairs: list[tuple[bytes, bytes]] = []
    for pair in text.split(b"&"):
        name = pair.partition(b"=")[0]
        if b"%" in name:
            name = _ESCAPE.sub(_decoded, name)
            if not _VISIBLE(name):
                return None
        pairs.append((name.partition(b"[")[0].partition(b".")[0], pair))
    pairs.sort(key=_first)  # stable: pairs of one name keep their order
    return b"&".join([pair for _, pair in pairs])


def _decoded(escape: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escape[1].decode())


def _first(pair: tuple[bytes, bytes]) -> bytes:
    return pair[0]
