"""The commands, as a user runs them: real processes on real files."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import zstandard
from making import (
    END_OF_TEXT,
    SAMPLE,
    SHARED,
    frame,
    line,
    num_tokens,
    run_cli,
    write_bytes_tokenizer,
    write_shard,
)
from tokenizers import Tokenizer

from pipeline.tokenbin import TokenBins, read_dataset, read_receipt


@dataclass(frozen=True)
class Run:
    """What a command printed, and how it ended."""

    done: CompletedProcess[str]

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.done.stdout.splitlines()]


def succeed(*arguments: object, **env: str) -> Run:
    done = run_cli(*arguments, **env)
    assert done.returncode == 0, done.stderr
    return Run(done)


def fail(*arguments: object) -> str:
    """What a command that has to fail says: never a traceback."""
    done = run_cli(*arguments)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def tokenize(folder: Path, *options: object) -> tuple[object, ...]:
    """The command for DATA and BINS in `folder`, without a hold-out."""
    places = ("--data", folder / "data", "--out", folder / "bins", "--workers", 1)
    return ("tokenize", *places, "--holdout", 0, *options)


def tree(folder: Path) -> dict[str, str]:
    """Every file and what it holds."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True)
class Built:
    """The sample's tokenizer and bins."""

    folder: Path
    trained: dict[str, Any]
    sums: list[dict[str, Any]]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A tokenizer trained on the sample in the repository, and its bins, made by two workers."""
    folder = tmp_path_factory.mktemp("sample")
    out = ("--out", folder / "tokenizer.json")
    trained = succeed("train-tokenizer", "--data", SAMPLE, "--vocab-size", 2048, *out)
    bins = ("--out", folder / "bins", "--workers", 2)
    return Built(folder, trained.facts[0], succeed("tokenize", "--data", SAMPLE, *bins).facts)


# ------------------------------------------------------------------ the whole way


def plain_count(
    shards: Sequence[Path], tokenizer: Tokenizer
) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Ids of every document and [documents, tokens, bytes] of each subset, by the libraries."""
    tokenizer.encode_special_tokens = True
    documents: list[list[int]] = []
    subsets: dict[str, list[int]] = {}
    for shard in shards:
        with shard.open("rb") as file:
            content = zstandard.ZstdDecompressor().stream_reader(file).read()
        records = [json.loads(row) for row in content.split(b"\n") if row]
        texts = [record["text"] for record in records]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for record, ids in zip(records, (encoding.ids for encoding in encodings), strict=True):
            documents.append(ids)
            sums = subsets.setdefault(record["meta"]["pile_set_name"], [0, 0, 0])
            for index, more in enumerate((1, len(ids) + 1, len(record["text"].encode()))):
                sums[index] += more
    return documents, subsets


def assert_same_as_plain_count(
    data: Path, tokenizer: Path, bins: Path, sums: list[dict[str, Any]]
) -> None:
    """Bins, receipts and the printed sums against a count that uses nothing of ours."""
    library = Tokenizer.from_file(str(tokenizer))
    end_of_text = library.token_to_id(END_OF_TEXT)
    train = sorted(data.glob("[0-9][0-9].jsonl.zst"))
    for split, shards in (("train", train), ("val", [data / "val.jsonl.zst"])):
        documents, subsets = plain_count(shards, library)
        (told,) = (row for row in sums if row["split"] == split)
        assert {name: list(counts.values()) for name, counts in told["subsets"].items()} == subsets
        assert [told[name] for name in ("documents", "tokens", "text_bytes")] == [
            sum(column) for column in zip(*subsets.values(), strict=True)
        ]
        read = TokenBins(bins, split)
        tokens = np.concatenate([read.tokens(index) for index in range(len(shards))])
        expected = [token for document in documents for token in (*document, end_of_text)]
        assert np.array_equal(tokens, expected)
        assert told["max_id"] == max(expected)


def test_bins_of_the_sample_equal_a_plain_count(sample: Built) -> None:
    """Documents, tokens and bytes of each subset, and each id: counted without our code."""
    tokenizer = sample.folder / "tokenizer.json"
    assert_same_as_plain_count(SAMPLE, tokenizer, sample.folder / "bins", sample.sums)


@pytest.mark.accept
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "uint16"), ("o200k_base", "uint32")])
def test_bins_of_a_corpus_equal_a_plain_count(tmp_path: Path, name: str, dtype: str) -> None:
    """The same on fifty megabytes, with the tokenizers that people use."""
    data, tokenizer = SHARED / "minipile", SHARED / "tokenizers" / f"{name}.json"
    places = ("--data", data, "--shards", "00-29", "--tokenizer", tokenizer)
    run = succeed("tokenize", *places, "--out", tmp_path / "bins")
    assert read_dataset(tmp_path / "bins").dtype == dtype
    assert_same_as_plain_count(data, tokenizer, tmp_path / "bins", run.facts)
    succeed("verify", tmp_path / "bins")
    if name == "gpt2":
        assert_nanogpt_reads(tmp_path / "bins" / "train" / "00.bin", tokenizer, 1024)


def assert_nanogpt_reads(path: Path, tokenizer: Path, block_size: int) -> None:
    """What nanoGPT's get_batch does, and the text that comes of it."""
    data = np.memmap(path, dtype=np.uint16, mode="r")
    text = Tokenizer.from_file(str(tokenizer)).decode(data.tolist(), skip_special_tokens=False)
    place = random.Random(1337)
    for i in (place.randrange(len(data) - block_size) for _ in range(4)):
        x = data[i : i + block_size].astype(np.int64)
        y = data[i + 1 : i + 1 + block_size].astype(np.int64)
        assert x.shape == y.shape == (block_size,)
        assert x[1:].tolist() == y[:-1].tolist()
    first = text.partition(END_OF_TEXT)[0]
    with zstandard.open(source_of(path), "rb") as file:
        assert first == json.loads(file.read().split(b"\n")[0])["text"]


def source_of(path: Path) -> Path:
    """The shard that a bin was made from, in the corpora that the tests know."""
    receipt = read_receipt(path.with_suffix(".json"))
    assert receipt.source
    candidates = (folder / receipt.source.name for folder in (SAMPLE, SHARED / "minipile"))
    return next(
        path
        for path in candidates
        if path.exists() and sha256(path.read_bytes()).hexdigest() == receipt.source.sha256
    )


def test_nanogpt_reads_the_bins_as_they_are(sample: Built) -> None:
    """Its loader maps a file of uint16 without a header, and so do many others."""
    path = sample.folder / "bins" / "train" / "00.bin"
    assert_nanogpt_reads(path, sample.folder / "tokenizer.json", 256)


def test_the_number_of_workers_changes_no_byte(sample: Built, tmp_path: Path) -> None:
    """Receipts included: a bin must not depend on the machine."""
    places = ("--data", SAMPLE, "--tokenizer", sample.folder / "tokenizer.json")
    succeed("tokenize", *places, "--out", tmp_path / "bins", "--workers", 1)
    assert tree(tmp_path / "bins") == tree(sample.folder / "bins")


def test_a_second_run_does_nothing_and_says_the_same(sample: Built) -> None:
    """Jobs are started again; only what is missing may cost time."""
    before = tree(sample.folder)
    run = succeed("tokenize", "--data", SAMPLE, "--out", sample.folder / "bins")
    assert run.facts == sample.sums
    assert "0 of 31 shards to build" in run.done.stderr
    assert tree(sample.folder) == before
    verified = succeed("verify", sample.folder / "bins")
    assert verified.facts == sample.sums


def test_shards_are_added_and_nothing_else_is_touched(tmp_path: Path) -> None:
    """Thirty shards come one by one, and so do the jobs of an array."""
    for number in range(4):
        write_shard(tmp_path / "data" / f"0{number}.jsonl.zst", [f"document {number}"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    before: dict[str, str] = {}
    for shards, count in (("0-1", 2), ("03", 3), ("all", 4)):
        succeed(*tokenize(tmp_path, "--shards", shards))
        after = tree(tmp_path / "bins")
        assert before.items() <= after.items()
        assert len(TokenBins(tmp_path / "bins", "train").receipts) == count
        before = after


# ------------------------------------------------------------------ tokenizers


def test_one_tokenizer_comes_of_one_corpus(tmp_path: Path) -> None:
    """Ties broken by chance give two vocabularies, and bins that do not fit together."""
    texts = [f"tok{n % 37} alpha beta {'abcde'[n % 5] * 3}" for n in range(3000)]
    write_shard(tmp_path / "data" / "00.jsonl.zst", texts[:1500])
    write_shard(tmp_path / "data" / "01.jsonl.zst", texts[1500:])
    found: set[str] = set()
    for number, (seed, threads) in enumerate([("0", "1"), ("1", "2"), ("random", "2")]):
        out = tmp_path / f"{number}.json"
        run = succeed(
            *("train-tokenizer", "--data", tmp_path / "data", "--vocab-size", 400, "--out", out),
            PYTHONHASHSEED=seed,
            RAYON_NUM_THREADS=threads,
        )
        found.add(run.facts[0]["sha256"])
        assert run.facts[0]["sha256"] == sha256(out.read_bytes()).hexdigest()
    assert len(found) == 1


def test_the_fingerprint_is_in_the_dataset(sample: Built) -> None:
    """Bins whose tokenizer is lost are numbers."""
    dataset = read_dataset(sample.folder / "bins")
    assert dataset.tokenizer_sha256 == sample.trained["sha256"]
    assert dataset.vocab_size == sample.trained["vocab_size"] == 2048
    copy, original = (sample.folder / name for name in ("bins/tokenizer.json", "tokenizer.json"))
    assert copy.read_bytes() == original.read_bytes()


@pytest.mark.parametrize(("asked", "reason"), [(32_000, "no more pairs"), (100, "always in it")])
def test_another_size_than_asked_for_is_said(tmp_path: Path, asked: int, reason: str) -> None:
    """The model must have as many rows as there are ids, not as were asked for."""
    write_shard(tmp_path / "data" / "00.jsonl", ["hello world"])
    out = tmp_path / "tokenizer.json"
    run = succeed(
        *("train-tokenizer", "--data", tmp_path / "data", "--vocab-size", asked, "--out", out),
    )
    assert run.facts[0]["vocab_size"] == 257
    assert f"has 257 entries, not the {asked:,} asked for" in run.done.stderr
    assert reason in run.done.stderr
    succeed(*tokenize(tmp_path))
    assert read_dataset(tmp_path / "bins").vocab_size == 257


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    """An empty vocabulary would fit everything."""
    write_shard(tmp_path / "data" / "00.jsonl.zst", [None])
    out = ("--out", tmp_path / "tokenizer.json")
    assert "no documents to train on" in fail("train-tokenizer", "--data", tmp_path / "data", *out)


def test_the_end_of_text_written_out_is_no_end_of_text(tmp_path: Path) -> None:
    """It would make five documents of three."""
    texts = [f"see {END_OF_TEXT} here", END_OF_TEXT, "plain"]
    write_shard(tmp_path / "data" / "00.jsonl.zst", texts)
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    (sums,) = succeed(*tokenize(tmp_path)).facts
    assert (sums["documents"], sums["tokens"]) == (3, num_tokens(texts))
    assert np.fromfile(tmp_path / "bins" / "train" / "00.bin", "<u2").tolist().count(256) == 3


def test_large_vocabularies_get_four_bytes(tmp_path: Path) -> None:
    """In two, 69999 would become 4463 without a word."""
    write_shard(tmp_path / "data" / "00.jsonl.zst", ["az"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json", 70_000, {ord("z"): 69_999})
    told = fail(*tokenize(tmp_path, "--dtype", "uint16"))
    assert "the largest id of the tokenizer is 69,999" in told
    assert not (tmp_path / "bins").exists()
    succeed(*tokenize(tmp_path))
    content = np.fromfile(tmp_path / "bins" / "train" / "00.bin", "<u4")
    assert content.tolist() == [97, 69_999, 256]


def test_another_tokenizer_or_option_into_the_same_bins_is_refused(tmp_path: Path) -> None:
    """Half of the bins would be in another language."""
    write_shard(tmp_path / "data" / "00.jsonl.zst", ["a"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    succeed(*tokenize(tmp_path))
    before = tree(tmp_path / "bins")
    other = write_bytes_tokenizer(tmp_path / "other.json", 300)
    assert "made with tokenizer_sha256" in fail(*tokenize(tmp_path, "--tokenizer", other))
    assert "made with repair False, this run has True" in fail(*tokenize(tmp_path, "--repair"))
    assert "made with dtype 'uint16'" in fail(*tokenize(tmp_path, "--dtype", "uint32"))
    assert tree(tmp_path / "bins") == before


def test_a_tokenizer_that_changes_text_is_noted_once(tmp_path: Path) -> None:
    """Whoever decodes the bins must know that the accents were composed."""
    write_shard(tmp_path / "data" / "00.jsonl.zst", ["e\u0301"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json", normalizer={"type": "NFC"})
    run = succeed(*tokenize(tmp_path))
    assert run.done.stderr.count("(normalizer NFC)") == 1
    receipt = read_receipt(tmp_path / "bins" / "train" / "00.json")
    assert "lossy" in receipt.encoder
    assert (receipt.tokens, receipt.text_bytes) == (3, 3)


# ------------------------------------------------------------------ shards


def test_what_is_no_shard_fails_by_name_and_the_rest_is_built(tmp_path: Path) -> None:
    """Error pages, pointer files and empty files are what failed downloads leave."""
    data = tmp_path / "data"
    data.mkdir()
    rubbish = [
        line("plain text, never compressed"),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n",
        b"<html><body>404</body></html>",
        b"",
    ]
    for number, content in enumerate(rubbish):
        (data / f"0{number}.jsonl.zst").write_bytes(content)
    write_shard(data / "04.jsonl.zst", ["the only good shard"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    told = fail(*tokenize(tmp_path))
    for number in range(4):
        assert told.count(f"0{number}.jsonl.zst: ") == 1
    assert "4 of 5 shards failed: " in told
    built = sorted(path.name for path in (tmp_path / "bins" / "train").iterdir())
    assert built == ["04.bin", "04.docs.npy", "04.json"]
    assert read_receipt(tmp_path / "bins" / "train" / "04.json").tokens == 20


def test_a_cut_shard_is_no_shorter_shard(tmp_path: Path) -> None:
    """Readers that take the cut for the end lose two fifths of the corpus and succeed."""
    digits = random.Random(2)
    texts = [f"doc {n} {digits.randbytes(50).hex()}" for n in range(5_000)]
    whole = write_shard(tmp_path / "data" / "00.jsonl.zst", texts).read_bytes()
    (tmp_path / "data" / "01.jsonl.zst").write_bytes(whole[: len(whole) * 6 // 10])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    assert "01.jsonl.zst: cut off inside the zstd frame" in fail(*tokenize(tmp_path))
    assert not list((tmp_path / "bins" / "train").glob("01*"))
    receipt = read_receipt(tmp_path / "bins" / "train" / "00.json")
    assert (receipt.documents, receipt.tokens) == (5_000, num_tokens(texts))


def test_counts_do_not_depend_on_frames_or_line_ends(tmp_path: Path) -> None:
    """Joined archives and texts with U+2028 are where documents get lost."""
    first, second = [f"a{n}" for n in range(5)], [f"b{n}" for n in range(7)]
    texts = ["one\u2028two", "three\u2029four", "five\u0085six", "crlf", "tab\there", "last"]
    rows = b"".join(map(line, texts)).replace(b'"crlf"}\n', b'"crlf"}\r\n').rstrip(b"\n")
    data = tmp_path / "data"
    data.mkdir()
    frames = [frame(b"".join(map(line, part))) for part in (first, [], second)]
    (data / "00.jsonl.zst").write_bytes(b"".join(frames))
    (data / "01.jsonl.zst").write_bytes(frame(rows))
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    (sums,) = succeed(*tokenize(tmp_path)).facts
    assert (sums["documents"], sums["rejects"]) == (18, {})
    assert sums["tokens"] == 36 + num_tokens(texts)


def test_a_missing_shard_stops_the_run_before_any_work(tmp_path: Path) -> None:
    """It would be noticed when the other twenty-nine are done."""
    write_shard(tmp_path / "data" / "00.jsonl.zst", ["a"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    told = fail(*tokenize(tmp_path, "--shards", "00-02"))
    assert "asks for 01, 02, which are not there; there are 00" in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "bins").exists()


def test_what_would_spoil_the_bins_stops_the_run_before_any_work(tmp_path: Path) -> None:
    """Each of these was once taken, and cost the folder or the validation."""
    shard = write_shard(tmp_path / "data" / "00.jsonl.zst", ["a"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    ordinary = tokenize(tmp_path)
    for option in ("--holdout", "--max-reject-share"):
        done = run_cli(*ordinary, option, "nan")
        assert done.returncode == 2  # click's, for what is wrong in the command line itself
        assert "nan is no share" in done.stderr
    assert "trained on too" in fail(*ordinary, "--val", shard)
    assert "the shards are there" in fail(*ordinary, "--out", tmp_path / "data")
    (tmp_path / "data" / "01.jsonl.zst").symlink_to(tmp_path / "gone")
    assert "01.jsonl.zst: named like a shard, but no file" in fail(*ordinary)
    assert not (tmp_path / "bins").exists()


def test_an_adopted_bin_is_not_replaced(tmp_path: Path) -> None:
    """No shard could bring it back."""
    write_shard(tmp_path / "data" / "00.jsonl.zst", ["a"])
    tokenizer = write_bytes_tokenizer(tmp_path / "tokenizer.json")
    bare = tmp_path / "00.bin"
    np.array([98, 256], np.uint16).tofile(bare)
    succeed("verify", tmp_path / "bins", "--adopt", bare, "--tokenizer", tokenizer)
    assert "adopted, and shard 00 would replace it" in fail(*tokenize(tmp_path))
    assert (tmp_path / "bins" / "train" / "00.bin").read_bytes() == bare.read_bytes()


def test_too_little_disk_stops_the_run_before_any_work(tmp_path: Path) -> None:
    """A file that claims more than the disk has is enough to see it."""
    huge = write_shard(tmp_path / "data" / "00.jsonl.zst", ["a"])
    try:
        with huge.open("r+b") as file:
            file.truncate(shutil.disk_usage(tmp_path).total)
    except OSError:
        pytest.skip("this file system has no sparse files")
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    assert "the bins need about" in fail(*tokenize(tmp_path))
    assert not (tmp_path / "bins").exists()


# ------------------------------------------------------------------ validation


NOTHING = "training goes without validation"


@pytest.mark.parametrize(
    ("options", "file", "documents", "said"),
    [
        (["--holdout", "0"], True, {"train": 400, "val": 2}, "4 of 4 shards"),
        ([], True, {"train": 400, "val": 2}, "4 of 4 shards"),
        (["--val", "none", "--holdout", "0"], True, {"train": 400}, NOTHING),
        (["--holdout", "0"], False, {"train": 400}, NOTHING),
        (["--holdout", "1e-9"], False, {"train": 400, "val": 0}, "takes none of 400 documents"),
    ],
)
def test_validation_is_a_file_a_hold_out_or_nothing(
    tmp_path: Path, options: list[str], file: bool, documents: dict[str, int], said: str
) -> None:
    """Which of them it was must be seen, also when it came to nothing."""
    for number in range(3):
        texts = [f"{number} {n}" for n in range((200, 150, 50)[number])]
        write_shard(tmp_path / "data" / f"0{number}.jsonl.zst", texts)
    if file:
        write_shard(tmp_path / "data" / "val.jsonl.zst", ["a", "b"])
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    run = succeed(
        *("tokenize", "--data", tmp_path / "data", "--out", tmp_path / "bins", "--workers", 1),
        *options,
    )
    assert {row["split"]: row["documents"] for row in run.facts} == documents
    assert said in run.done.stderr
