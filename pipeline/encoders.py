"""Texts to token ids, by a fast library that has to prove itself against the reference.

The reference is `tokenizers`, whose format a tokenizer.json is. `fastokens` is some fifty times as
fast, and is used as long as it gives the very same ids: of nasty texts at the start, of the first
documents of every shard, and of one document in a thousand after that. Which ones they are depends
on the documents alone, so what comes of it is the same for any number of workers.

A long document is encoded in pieces, cut where the tokenizer cuts anyway, so that the memory that
encoding takes does not grow with it: the reference needs about 140 bytes a byte of text.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.bpe import BPE, LLAMA3_PATTERN, TokenizerError
from pipeline.probe import NASTY
from pipeline.shards import Batch

EncoderName = Literal["auto", "fastokens", "tokenizers"]

PIECE_CHARS = 1 << 19  # a longer text is cut, where that is safe
PROBE_CHARS = 1 << 12  # of the first documents of a shard, encoded twice
CHECKED_IN = 1000  # one document of so many is encoded twice,
CHECKED_CHARS = 1 << 16  # unless it is longer than this

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_PATTERN = (  # of the o200k_base tokenizer
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SIGNS = set(' \t\n!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~')  # an apostrophe belongs to the word before it

log = logging.getLogger(__name__)


class ParityError(TokenizerError):
    """The fast encoder gave other ids than the reference."""


class Tokens(NamedTuple):
    """The ids of several texts."""

    ids: NDArray[np.uint32]  # of all texts, one after another; shape (sum,)
    lengths: NDArray[np.int64]  # how many each has; shape (texts,)


class Encoder:
    """Texts to token ids by one library, compared with another if there is a `reference`.

    Args:
        name: for receipts: the library, its version, and what the tokenizer loses.
        encode: the library's call.
        boundary: where a long text can be cut without a change of its ids.
        threads: batches that `encode_shard` works on at a time.
        reference: the encoder to compare with.
        fallback: what a shard is encoded with when they differ; None lets it fail.
    """

    def __init__(
        self,
        name: str,
        encode: Callable[[list[str]], Tokens],
        boundary: re.Pattern[str] | None,
        threads: int = 1,
        *,
        reference: Encoder | None = None,
        fallback: Encoder | None = None,
    ) -> None:
        self.name = name
        self.fallback = fallback
        self._encode = encode
        self._boundary = boundary
        self._threads = threads
        self._reference = reference

    def encode_shard(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tokens]]:
        """The batches of a shard in their order, encoded a few ahead if there are threads for it.

        Raises:
            ParityError: the ids of a document differ from the reference's: all are in doubt.
        """
        batches = iter(batches)
        for first in batches:
            yield first, self.encode_batch(first.texts, _first_documents(first.texts))
            break
        if self._threads == 1:
            for batch in batches:
                yield batch, self.encode_batch(batch.texts)
            return
        ahead: deque[tuple[Batch, Future[Tokens]]] = deque()
        with ThreadPoolExecutor(self._threads) as pool:
            for batch in batches:
                ahead.append((batch, pool.submit(self.encode_batch, batch.texts)))
                if len(ahead) > self._threads:
                    done, tokens = ahead.popleft()
                    yield done, tokens.result()
            for done, tokens in ahead:
                yield done, tokens.result()

    def encode_batch(self, texts: Sequence[str], probe: Sequence[int] = ()) -> Tokens:
        """The ids of all texts; those that `probe` numbers are compared with the reference's.

        Raises:
            ParityError: they differ.
        """
        tokens = self._encode_long(texts)
        if self._reference:
            rows = sorted({*probe, *(row for row, text in enumerate(texts) if is_checked(text))})
            _compare(self, self._reference, texts, tokens, rows)
        return tokens

    def _encode_long(self, texts: Sequence[str]) -> Tokens:
        """All texts, the long ones one by one and in pieces."""
        if max(map(len, texts), default=0) <= PIECE_CHARS:
            return self._encode(list(texts))
        parts: list[NDArray[np.uint32]] = []
        lengths: list[int] = []
        for text in texts:
            pieces = [self._encode([piece]).ids for piece in cut(text, self._boundary)]
            parts += pieces
            lengths.append(sum(map(len, pieces)))
        return Tokens(np.concatenate(parts), np.array(lengths, np.int64))


def choose_encoder(bpe: BPE, wanted: EncoderName = "auto", threads: int = 1) -> Encoder:
    """The encoder to use: `auto` is the fast one if it proves itself, else the reference.

    Raises:
        TokenizerError: the fast one is wanted and cannot be had, or differs from the reference.
    """
    # Threads of ours have a batch each; those of the libraries would share one.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    # Its caches of words are bounded, see docs/DESIGN.md. These would keep whole documents.
    for unwanted in ("FASTOKENS_INPUT_CACHE", "FASTOKENS_SEGMENT_CACHE"):
        os.environ.pop(unwanted, None)
    boundary = safe_boundary(bpe.tokenizer)
    reference = Encoder(
        _receipt_name("tokenizers", bpe), _reference(bpe.tokenizer), boundary, threads
    )
    if wanted == "tokenizers":
        return reference
    try:
        fast = Encoder(
            _receipt_name("fastokens", bpe),
            _fast(bpe),
            boundary,
            threads,
            reference=reference,
            fallback=reference if wanted == "auto" else None,
        )
        fast.encode_batch(NASTY, probe=range(len(NASTY)))
    except (ImportError, TokenizerError) as error:
        if wanted == "fastokens":
            raise TokenizerError(f"--encoder fastokens: {error}") from None
        log.warning("%s: encoding with tokenizers, which is slow", error)
        return reference
    return fast


# ------------------------------------------------------------------ the libraries


def _receipt_name(library: str, bpe: BPE) -> str:
    return f"{library} {version(library)}" + (f"; lossy: {bpe.lossy}" if bpe.lossy else "")


def _reference(tokenizer: Tokenizer) -> Callable[[list[str]], Tokens]:
    def encode(texts: list[str]) -> Tokens:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        lengths = np.array([len(part) for part in parts], np.int64)
        return Tokens(np.concatenate(parts or [np.zeros(0, np.uint32)]), lengths)

    return encode


def _fast(bpe: BPE) -> Callable[[list[str]], Tokens]:
    import fastokens  # not there on every platform

    configuration = bpe.tokenizer.to_str()
    if bpe.tokenizer.get_vocab_size() != bpe.vocab_size:
        configuration = _without_holes(configuration)
    try:
        tokenizer = fastokens.Tokenizer.from_json_str(configuration)
    except ValueError as error:
        raise TokenizerError(f"fastokens cannot use this tokenizer ({error})") from None

    def encode(texts: list[str]) -> Tokens:
        try:
            ids, ends = tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        except ValueError as error:
            raise ParityError(f"fastokens failed ({error})") from None
        places = np.frombuffer(ends, "<u8").astype(np.int64)
        return Tokens(np.frombuffer(ids, "<u4"), places[1:] - places[:-1])

    return encode


def _without_holes(configuration: str) -> str:
    """With an entry for every id that has none: fastokens counts on that."""
    content = orjson.loads(configuration)
    vocab: dict[str, int] = content["model"]["vocab"]
    holes = set(range(max(vocab.values()))).difference(vocab.values())
    vocab |= {f" {hole}": hole for hole in holes}  # a word spells a blank otherwise
    return orjson.dumps(content).decode()


# ------------------------------------------------------------------ comparing them


def _first_documents(texts: Sequence[str]) -> list[int]:
    rows: list[int] = []
    left = PROBE_CHARS
    for row, text in enumerate(texts):
        if len(text) <= left:
            rows.append(row)
            left -= len(text)
    return rows


def is_checked(text: str) -> bool:
    """Whether a document is encoded twice: drawn by a hash of its beginning and its length."""
    return crc32(text[:64].encode(), len(text)) % CHECKED_IN == 0 and len(text) <= CHECKED_CHARS


def _compare(
    fast: Encoder, reference: Encoder, texts: Sequence[str], found: Tokens, rows: Sequence[int]
) -> None:
    if not rows:
        return
    ends = np.cumsum(found.lengths)
    wanted = reference.encode_batch([texts[row] for row in rows])
    start = 0
    for row, length in zip(rows, wanted.lengths.tolist(), strict=True):
        have = found.ids[ends[row] - found.lengths[row] : ends[row]]
        want = wanted.ids[start : start + length]
        start += length
        if not np.array_equal(have, want):
            same = min(len(have), len(want))
            at = int(np.append(np.flatnonzero(have[:same] != want[:same]), same)[0])
            raise ParityError(
                f"{fast.name} differs from {reference.name}: of {texts[row][:200]!r}"
                f"{'…' if len(texts[row]) > 200 else ''}, from token {at} on, it gives "
                f"{have[at : at + 5].tolist()}, expected {want[at : at + 5].tolist()}"
            )


# ------------------------------------------------------------------ long texts


def cut(
    text: str, boundary: re.Pattern[str] | None, piece_chars: int = PIECE_CHARS
) -> Iterator[str]:
    """The pieces of a text: a little longer than `piece_chars`, or as far as the next boundary."""
    start = 0
    while boundary and (found := boundary.search(text, start + piece_chars)):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def safe_boundary(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Where the ids of a text are those of its two parts, for the tokenizers known well enough.

    That is between an ASCII letter or digit and a sign or blank. There the patterns listed here
    always end a word; they look back at nothing, and ahead only from blanks; NFC joins nothing
    across it; and the byte-level BPE works inside words. Added tokens are the exception, so signs
    that stand there in one of those are left out.
    """
    match _configuration(tokenizer.pre_tokenizer):
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            pass
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if pattern in (LLAMA3_PATTERN, O200K_PATTERN):
            pass
        case _:
            return None
    if _configuration(tokenizer.normalizer) not in (None, {"type": "NFC"}):
        return None
    signs = set(_SIGNS)
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special:  # ordinary text here
            continue
        if token.single_word or token.lstrip or token.rstrip:
            return None
        signs -= set(re.findall(r"(?<=[0-9A-Za-z])[^0-9A-Za-z]", token.content))
    return re.compile(f"(?<=[0-9A-Za-z])(?=[{re.escape(''.join(sorted(signs)))}])")


def _configuration(part: Any) -> Any:
    """What tokenizer.json says of a normalizer or a pre-tokenizer."""
    return part and orjson.loads(part.__getstate__())
