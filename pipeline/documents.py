"""One line of a shard to one document: what is taken, what is rejected and why, what is mended.

orjson is the judge: the whole line must be JSON in valid UTF-8 without lone surrogates, and of a
repeated key the last one counts. Whoever parses faster has to agree with `parse` on every line.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

UNKNOWN_SUBSET = "unknown"  # of a document that does not name its subset
_BLANK = b" \t\r"
_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
}
# Every escape is consumed from left to right, so that a backslash that is itself escaped
# never starts one, and a proper pair is never taken apart.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|.)",
    re.DOTALL,
)


class RejectError(Exception):
    """A line holds no document; its text is the reason, one of few."""


def parse(line: bytes, repair: bool = False) -> tuple[str, str] | None:
    """The text and the subset of a line, or None for a blank one.

    Args:
        line: without its newline.
        repair: turn invalid UTF-8 and lone surrogates into U+FFFD instead of rejecting them.

    Raises:
        RejectError: there is no document in it.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        if not line.strip(_BLANK):
            return None
        record = _look_again(line, repair)
    if type(record) is not dict or "text" not in record:
        raise RejectError("no text")
    text = record["text"]
    if type(text) is not str:
        raise RejectError(f"text is {_KINDS[type(text)]}")
    meta = record.get("meta")
    subset = meta.get("pile_set_name") if type(meta) is dict else None
    return text, subset if type(subset) is str else UNKNOWN_SUBSET


def _look_again(line: bytes, repair: bool) -> Any:
    """The record in a line that orjson refused, if it can be mended and may be."""
    text = line.decode("utf-8", "replace").encode()
    mended = _ESCAPE.sub(lambda found: rb"\ufffd" if found["lone"] else found[0], text)
    try:
        record = orjson.loads(mended)
    except orjson.JSONDecodeError:
        raise RejectError("not JSON" if repair or text == line else "invalid UTF-8") from None
    if not repair:
        raise RejectError("lone surrogate" if text == line else "invalid UTF-8")
    return record
