"""Lines to documents."""

import json

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.documents import UNKNOWN_SUBSET, RejectError, parse

# The first draw loads Unicode's tables, which takes a second on a fresh machine.
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
lines = st.one_of(
    st.binary(max_size=40),
    st.dictionaries(st.sampled_from(["text", "meta", "other"]), values).map(
        lambda record: json.dumps(record).encode()
    ),
    st.text(st.characters(), max_size=10).map(lambda text: json.dumps({"text": text}).encode()),
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"text": NaN}', "not JSON"),
        (b"<html>", "not JSON"),
        (b'{"text": "a"}{"text": "b"}', "not JSON"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "\xed\xa0\xbd"}', "invalid UTF-8"),
        (rb'{"text": "\ud83d"}', "lone surrogate"),
        (rb'{"text": "\ude00\ud83d"}', "lone surrogate"),
        (rb'{"text": "fine", "meta": {"\ud83d": 1}}', "lone surrogate"),
        (rb'{"text": "\ud83d', "not JSON"),
        (b'{"meta": {}}', "no text"),
        (b'["text"]', "no text"),
        (b'"text"', "no text"),
        (b'{"text": null}', "text is null"),
        (b'{"text": true}', "text is boolean"),
        (b'{"text": 7}', "text is number"),
        (b'{"text": 7.5}', "text is number"),
        (b'{"text": ["a"]}', "text is array"),
        (b'{"text": {"a": 1}}', "text is object"),
    ],
)
def test_what_holds_no_document_is_rejected_by_reason(line: bytes, reason: str) -> None:
    """Otherwise a run would die on it, or the word None would be trained on."""
    with pytest.raises(RejectError, match=f"^{reason}$"):
        parse(line)


@pytest.mark.parametrize("line", [b"", b" ", b"\t \r", b"\r"])
def test_a_blank_line_is_neither_a_document_nor_a_reject(line: bytes) -> None:
    """Blank lines at the end of an archive would otherwise count against it."""
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "a", "meta": {"pile_set_name": "ArXiv"}}\r', ("a", "ArXiv")),
        (b'{"text": ""}', ("", UNKNOWN_SUBSET)),
        (b'{"text": "a", "meta": "ArXiv"}', ("a", UNKNOWN_SUBSET)),
        (b'{"text": "a", "meta": {"pile_set_name": 3}}', ("a", UNKNOWN_SUBSET)),
        (b'{"text": "a", "text": "b"}', ("b", UNKNOWN_SUBSET)),
        ('{"text": "a\u2028b\u0085c"}'.encode(), ("a\u2028b\u0085c", UNKNOWN_SUBSET)),
        (rb'{"text": "\ud83d\ude00\u0000"}', ("\U0001f600\x00", UNKNOWN_SUBSET)),
    ],
)
def test_text_and_subset_are_taken_as_they_are(line: bytes, expected: tuple[str, str]) -> None:
    """A document must reach the bins as it was written."""
    assert parse(line) == expected


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (rb'{"text": "hi \ud83d there"}', "hi \ufffd there"),
        (rb'{"text": "\ud83d\ud83d\ude00\ude00"}', "\ufffd\U0001f600\ufffd"),
        (rb'{"text": "\\ud83d"}', r"\ud83d"),
        (rb'{"text": "\\\ud83d"}', "\\\ufffd"),
        (b'{"text": "a\xffb"}', "a\ufffdb"),
        (rb'{"text": "plain", "meta": {"x": "\ud83d"}}', "plain"),
    ],
)
def test_repair_turns_what_is_no_character_into_the_replacement(line: bytes, text: str) -> None:
    """A document with one broken emoji is worth keeping, and nothing else of it may change."""
    assert parse(line, repair=True) == (text, UNKNOWN_SUBSET)


@quick
@given(line=lines)
def test_what_orjson_takes_is_taken_and_nothing_else(line: bytes) -> None:
    """Two parsers that disagree make two corpora of one shard."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = None
    text = record.get("text") if isinstance(record, dict) else None
    try:
        found = parse(line)
    except RejectError:
        found = None
    assert (found and found[0]) == (text if isinstance(text, str) else None)


@quick
@given(text=st.text(st.characters(), max_size=20))
def test_repair_changes_lone_surrogates_and_nothing_else(text: str) -> None:
    """`json` writes and accepts them: its reading, mended, is the reference."""
    line = json.dumps({"text": text}).encode()
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    found = parse(line, repair=True)
    assert found
    assert found[0] == mended
