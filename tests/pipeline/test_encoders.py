"""Encoding: the fast library against the reference, on texts chosen to make them differ."""

import json
import logging
import os
import random
import unicodedata
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import (
    END_OF_TEXT,
    SAMPLE,
    SHARED,
    run_cli,
    run_measured,
    write_bytes_tokenizer,
    write_shard,
)

from pipeline.bpe import BPE, TokenizerError, load, train
from pipeline.encoders import (
    O200K_PATTERN,
    Encoder,
    ParityError,
    Tokens,
    choose_encoder,
    cut,
    is_checked,
    safe_boundary,
)
from pipeline.probe import NASTY
from pipeline.shards import Batch, Shard, ShardReader, find_shards
from pipeline.tokenbin import read_receipt

MEGABYTE = 1 << 20
LONG_WORDS = {
    "a letter": "a" * MEGABYTE,
    "blanks": " " * MEGABYTE,
    "newlines": "\n" * MEGABYTE,
}
SCRIPTS = {
    "emoji joined": "\U0001f469\u200d\U0001f52c\U0001f3fd\ufe0f\u20e3 " * 2000,
    "marks composed": unicodedata.normalize("NFC", "a\u0301e\u0323\u0302o\u0308\u0304 ") * 2000,
    "marks decomposed": unicodedata.normalize("NFD", "áệȫ ") * 2000,
    "unassigned": "\u0378\u0ff0 \U000e0fff\U0003fffe" * 2000,
    "thai": "ภาษาไทยเป็นภาษาที่มีระดับเสียง" * 500,
    "devanagari": "हिन्दी विश्व की एक प्रमुख भाषा है " * 500,
    "cjk": "漢字かな交じり文、한국어。中文字符" * 500,
    "line ends": "a\r\nb\n\r\r\n\n c\r" * 2000,
    "end of text": f"{END_OF_TEXT}<|endof{END_OF_TEXT} text|>\n" * 500,
    "base64": "TWFuIGlzIGRpc3Rpbmd1aXNoZWQ+/8gbm90==" * 2000,
    "zeros": "\x00" * 2000,
}


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def bpe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BPE:
    """The demo's tokenizer, on a part of its sample and with either pattern."""
    shards = find_shards(SAMPLE, "0-4")
    texts = (text for shard in shards for batch in ShardReader(shard) for text in batch.texts)
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    path.write_bytes(train(texts, 2000, request.param))
    return load(path)


def both(bpe: BPE) -> tuple[Encoder, Encoder]:
    """The fast encoder and the reference."""
    return choose_encoder(bpe, "fastokens"), choose_encoder(bpe, "tokenizers")


def equal(one: Tokens, other: Tokens) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------ the same ids


def test_the_fast_library_gives_the_ids_of_the_reference(bpe: BPE) -> None:
    """One id in a million that differs is a corpus that nobody can make again."""
    fast, reference = both(bpe)
    for texts in (NASTY, tuple(SCRIPTS.values())):
        assert equal(fast.encode_batch(texts), reference.encode_batch(texts))
    assert fast.encode_batch([]).ids.size == 0


@pytest.mark.parametrize("name", LONG_WORDS)
def test_a_megabyte_long_word_has_the_same_ids(tmp_path: Path, name: str) -> None:
    """A table's rule, or a file of zeros: it must not take hours either."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(["a" * 99, "\n" * 99, "    "] * 9, 300))
    fast, reference = both(load(path))
    text = [LONG_WORDS[name]]
    assert equal(fast.encode_batch(text), reference.encode_batch(text))


@pytest.mark.accept
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", ["gpt2", "gpt-neox-20b", "allenai_dolma2", "cl100k_base", "o200k_base"]
)
def test_every_document_has_the_same_ids_with_every_tokenizer(name: str) -> None:
    """The tokenizers that people bring, on text in 22 genres and every script."""
    bpe = load(SHARED / "tokenizers" / f"{name}.json")
    assert safe_boundary(bpe.tokenizer)  # its pattern is one of the known ones
    fast, reference = both(bpe)
    texts = [*NASTY, *SCRIPTS.values(), *LONG_WORDS.values()]
    assert equal(fast.encode_batch(texts), reference.encode_batch(texts))
    for path in sorted((SHARED / "minipile").glob("*.jsonl.zst")):
        for batch in ShardReader(Shard(path.stem, path)):
            assert equal(fast.encode_batch(batch.texts), reference.encode_batch(batch.texts)), path


# ------------------------------------------------------------------ proving itself


def other_ids(bpe: BPE, folder: Path) -> tuple[Encoder, Callable[[str], str]]:
    """An encoder of which one byte's ids differ from the reference it is compared with, and what
    makes a text that is compared of one that may not be.
    """
    reference = choose_encoder(bpe, "tokenizers")
    swapped = load(write_bytes_tokenizer(folder / "other.json", swap={ord("q"): ord("z")}))
    wrong = Encoder(
        "another 1.0",
        choose_encoder(swapped, "tokenizers").encode_batch,
        None,
        reference=reference,
        fallback=reference,
    )
    return wrong, lambda text: next(t for n in range(10**5) if is_checked(t := f"{n} {text}"))


def test_a_library_that_cannot_use_the_tokenizer_leaves_it_to_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has an unusual tokenizer waits longer, and gets the right bins."""
    path = write_bytes_tokenizer(tmp_path / "t.json", normalizer={"type": "Nmt"})
    with caplog.at_level(logging.WARNING):
        encoder = choose_encoder(load(path))
    assert encoder.name.startswith("tokenizers ")
    assert "fastokens cannot use this tokenizer" in caplog.text
    with pytest.raises(TokenizerError, match="--encoder fastokens: fastokens cannot"):
        choose_encoder(load(path), "fastokens")


def test_a_difference_names_the_document_and_the_place(tmp_path: Path) -> None:
    """Without the text nobody could look into it, or report it to the library's authors."""
    bpe = load(write_bytes_tokenizer(tmp_path / "t.json"))
    wrong, checked = other_ids(bpe, tmp_path)
    text = checked("a queue")
    expected = rf"another 1.0 differs from tokenizers .*{text!r}, from token {text.index('q')} on"
    with pytest.raises(ParityError, match=expected):
        wrong.encode_batch(["quiet", text, "quick"])
    assert wrong.encode_batch(["quiet", "quick"]).ids[0] == ord("z")  # not among those drawn
    with pytest.raises(ParityError, match="'quick', from token 0"):
        wrong.encode_batch(["plain", "quick"], probe=[0, 1])


def test_the_first_documents_of_a_shard_are_compared(tmp_path: Path) -> None:
    """A library that is wrong throughout is found before hours have gone into it."""
    wrong, _ = other_ids(load(write_bytes_tokenizer(tmp_path / "t.json")), tmp_path)
    batches = [Batch(texts=["quick"]), Batch(texts=["quick"])]
    with pytest.raises(ParityError):
        list(wrong.encode_shard(batches))
    batches.insert(0, Batch(texts=["plain"]))
    assert len(list(wrong.encode_shard(batches))) == 3


def test_one_document_in_a_thousand_is_compared_and_none_too_long() -> None:
    """None would prove nothing; one in ten would make the fast library slow."""
    digits = random.Random(0)
    texts = [f"{digits.random()} begins it" for _ in range(50_000)]
    assert 25 <= sum(map(is_checked, texts)) <= 80
    assert not any(is_checked(f"{n}{'x' * 70_000}") for n in range(3000))


# ------------------------------------------------------------------ long texts

PIECES = (
    *("a", "Z", "9", "x1", "word", "don't", "'s", "'LL", "I'm", " ", "  ", "\n", "\r\n", "\t"),
    *(".", ",", "/", "//", "-", "=", "_", "|", "|||", "'", '"', "…", "。", "漢", "字", "é"),
    *("e\u0301", "\u0301", "\u200d", "\u00a0", "\u3000", "\x85", "ก", "\u0e33", "٣", "²"),
    *("|||PHONE_NUMBER|||", "a b", "\U0001f600", END_OF_TEXT, "<|endof", "text|>", "\x00"),
    *("HTTPServer", "iOS"),
)  # fmt: skip
hostile = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def variants(folder: Path) -> list[BPE]:
    """Tokenizers with every pattern that is cut, and all that could stand in the way."""
    texts = ["".join(random.Random(seed).choices(PIECES, k=200)) for seed in range(300)]
    made: list[BPE] = []
    for pattern in ("gpt2", "llama3", "o200k"):
        content = json.loads(train(texts, 900, "gpt2" if pattern == "gpt2" else "llama3"))
        if pattern == "o200k":
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = O200K_PATTERN
        added = [("|||PHONE_NUMBER|||", False), ("  ", True), ("a b", False), ("1/", True)]
        for number, (token, normalized) in enumerate(added):
            entry = {"id": 900 + number, "content": token, "special": False}
            entry |= {"single_word": False, "lstrip": False, "rstrip": False}
            content["added_tokens"].append(entry | {"normalized": normalized})
        content["normalizer"] = {"type": "NFC"} if pattern != "llama3" else None
        path = folder / f"{pattern}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        made.append(load(path))
    return made


@pytest.fixture(scope="module")
def cut_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[BPE]:
    return variants(tmp_path_factory.mktemp("variants"))


@settings(max_examples=300, deadline=None)
@given(text=hostile, piece_chars=st.integers(1, 12))
def test_a_text_in_pieces_has_the_ids_of_the_whole(
    cut_tokenizers: list[BPE], text: str, piece_chars: int
) -> None:
    """A long document must not be another one because it is long."""
    for bpe in cut_tokenizers:
        boundary = safe_boundary(bpe.tokenizer)
        pieces = list(cut(text, boundary, piece_chars))
        assert "".join(pieces) == text
        encoded = bpe.tokenizer.encode_batch_fast([text, *pieces], add_special_tokens=False)
        whole, *parts = (encoding.ids for encoding in encoded)
        assert list(chain(*parts)) == whole


def test_a_long_document_is_cut(bpe: BPE) -> None:
    """Or the property above would hold for nothing."""
    boundary = safe_boundary(bpe.tokenizer)
    text = "word and, word\n" * 1000
    assert len(list(cut(text, boundary, 100))) > 100
    assert list(cut("x" * 1000, boundary, 100)) == ["x" * 1000]
    fast, reference = both(bpe)
    texts = ["short", "some words, " * 50_000, "", "x" * 300_000]
    assert equal(fast.encode_batch(texts), reference.encode_batch(texts))


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
    ],
)
def test_an_unknown_tokenizer_is_given_whole_texts(tmp_path: Path, part: dict[str, object]) -> None:
    """Nothing is known of where it cuts."""
    fields = {"trim_offsets": True}
    if pre_tokenizer := part.get("pre_tokenizer"):
        part = {"pre_tokenizer": fields | pre_tokenizer}
    assert safe_boundary(load(write_bytes_tokenizer(tmp_path / "t.json", **part)).tokenizer) is None


# ------------------------------------------------------------------ threads, the command


def test_threads_change_neither_order_nor_ids(bpe: BPE) -> None:
    """A bin must not depend on how many cores the machine has."""
    batches = [Batch(texts=[f"document {n}.{row} " * 40 for row in range(20)]) for n in range(30)]
    expected = list(choose_encoder(bpe, "tokenizers").encode_shard(batches))
    for threads in (1, 3):
        found = list(choose_encoder(bpe, threads=threads).encode_shard(iter(batches)))
        assert [batch.texts for batch, _ in found] == [batch.texts for batch in batches]
        pairs = zip(found, expected, strict=True)
        assert all(equal(tokens, wanted) for (_, tokens), (_, wanted) in pairs)


def test_a_difference_in_a_thread_reaches_the_caller(tmp_path: Path) -> None:
    """It would be lost with the thread, and the shard be wrong."""
    wrong, checked = other_ids(load(write_bytes_tokenizer(tmp_path / "t.json")), tmp_path)
    threaded = Encoder(wrong.name, wrong.encode_batch, None, threads=2)
    batches = [Batch(texts=["plain"])] * 3 + [Batch(texts=[checked("quick")])]
    with pytest.raises(ParityError):
        list(threaded.encode_shard(batches))


def test_all_encoders_and_numbers_of_workers_write_the_same_bin(tmp_path: Path) -> None:
    """What a machine has installed must not be in the data."""
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    write_shard(tmp_path / "data" / "00.jsonl.zst", [f"text {n} " * 300 for n in range(600)])
    bins: set[bytes] = set()
    for encoder, workers in (("auto", 1), ("auto", 3), ("tokenizers", 2), ("fastokens", 1)):
        out = tmp_path / f"{encoder}-{workers}"
        done = run_cli(
            *("tokenize", "--data", tmp_path / "data", "--out", out / "bins", "--val", "none"),
            *("--tokenizer", tmp_path / "tokenizer.json", "--workers", workers),
            *("--encoder", encoder),
        )
        assert done.returncode == 0, done.stderr
        bins.add((out / "bins" / "train" / "00.bin").read_bytes())
        library = "tokenizers" if encoder == "tokenizers" else "fastokens"
        assert read_receipt(out / "bins" / "train" / "00.json").encoder.startswith(library)
    assert len(bins) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="asks for what a child process took")
@pytest.mark.parametrize("encoder", ["auto", "tokenizers"])
@pytest.mark.parametrize("alphabet", ["abcdefghijklmnopqrstuvwxyz", " ", "漢字中文"])
def test_a_long_word_takes_bounded_time_and_memory(
    tmp_path: Path, encoder: str, alphabet: str
) -> None:
    """A document that is one word of 8 MB, which no boundary can cut, stops no shard."""
    num_chars = 8_000_000 // len(alphabet[0].encode())
    text = "".join(random.Random(0).choices(alphabet, k=num_chars))
    write_shard(tmp_path / "data" / "00.jsonl.zst", [text])
    (tmp_path / "tokenizer.json").write_bytes(train(["the quick brown fox 漢字  "] * 9, 400))
    arguments = ("tokenize", "--data", tmp_path / "data", "--out", tmp_path / "bins")
    arguments += ("--val", "none", "--holdout", 0, "--workers", 1, "--encoder", encoder)
    cpu_s, peak_bytes = run_measured(*arguments)
    assert cpu_s < 60
    assert peak_bytes < 2 << 30
