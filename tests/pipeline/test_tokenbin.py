"""The format: what is written is what is read, and what cannot be is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import bytes_dataset, flat

from pipeline.tokenbin import (
    BinPaths,
    BinWriter,
    Counts,
    TokenBinError,
    TokenBins,
    TokenRangeError,
    create_dataset,
    read_dataset,
    read_receipt,
    sha256_of,
    write_exclusively,
)

quick = settings(max_examples=40, deadline=None)
documents = st.lists(st.lists(st.integers(0, 255), max_size=6), max_size=8)
TOKENIZER = b"{}"
DATASET = bytes_dataset(tokenizer_sha256=sha256(TOKENIZER).hexdigest())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bins")
    create_dataset(path, DATASET, TOKENIZER)
    return path


def write(folder: Path, batches: list[list[list[int]]], shard: str = "07") -> None:
    """A bin of these documents, the subset and line of each its ordinal."""
    with BinWriter(folder, "train", shard, DATASET) as writer:
        line = 0
        for batch in batches:
            lines = range(line + 1, line + 1 + len(batch))
            ids, lengths = flat(batch)
            sizes = [len(document) for document in batch]
            writer.append(ids, lengths, lines, sizes, [f"subset {n % 3}" for n in lines])
            line += len(batch)
        writer.finish(None, "by hand", {})


@quick
@given(batches=st.lists(documents, max_size=4))
def test_bins_give_back_any_documents(folder: Path, batches: list[list[list[int]]]) -> None:
    """Neighbouring documents must not merge, and none may get lost."""
    write(folder, batches)
    bins = TokenBins(folder, "train", "07")
    tokens, rows, receipt = bins.tokens(0), bins.documents(0), bins.receipts[0]
    given = [document for batch in batches for document in batch]
    assert tokens.tolist() == [token for document in given for token in (*document, 256)]
    starts = [0, *rows["end_token"].tolist()]
    found = [tokens[a : b - 1].tolist() for a, b in pairwise(starts)]
    assert found == given
    assert rows["line"].tolist() == list(range(1, len(given) + 1))
    assert (receipt.documents, receipt.tokens) == (len(given), len(tokens))
    assert receipt.max_id == max(tokens.tolist(), default=-1)
    names = list(receipt.subsets)
    assert [names[index] for index in rows["subset"]] == [
        f"subset {n % 3}" for n in range(1, len(given) + 1)
    ]
    for index, name in enumerate(names):
        of_subset = [given[n] for n in np.flatnonzero(rows["subset"] == index)]
        assert receipt.subsets[name] == Counts(
            documents=len(of_subset),
            tokens=sum(len(document) + 1 for document in of_subset),
            text_bytes=sum(map(len, of_subset)),
        )
    paths = BinPaths(folder, "train", "07")
    assert receipt.sha256 == {"bin": sha256_of(paths.bin), "docs": sha256_of(paths.docs)}


@quick
@given(batch=documents.filter(any), data=st.data(), bad=st.sampled_from([256, 257, 65_793, -1]))
def test_an_id_outside_the_vocabulary_is_refused_at_any_place(
    tmp_path_factory: pytest.TempPathFactory,
    batch: list[list[int]],
    data: st.DataObject,
    bad: int,
) -> None:
    """A cast to 16 bits would turn 65,793 into 257, and 256 would end a document in its middle."""
    number = data.draw(st.sampled_from([n for n, document in enumerate(batch) if document]))
    place = data.draw(st.integers(0, len(batch[number]) - 1))
    batch[number][place] = bad
    folder = tmp_path_factory.mktemp("refused")
    with pytest.raises(TokenRangeError, match=f"^07:{number + 1}: "):
        write(folder, [batch])
    assert list((folder / "train").iterdir()) == []


def test_four_bytes_hold_what_two_cannot(tmp_path: Path) -> None:
    """Large vocabularies are the rule today."""
    dataset = bytes_dataset(vocab_size=70_001)
    with BinWriter(tmp_path, "train", "00", dataset) as writer:
        writer.append(*flat([[97, 70_000]]), [1], [2], ["a"])
        writer.finish(None, "by hand", {})
    content = (tmp_path / "train" / "00.bin").read_bytes()
    assert np.frombuffer(content, "<u4").tolist() == [97, 70_000, 256]


@pytest.mark.parametrize(
    ("line", "size", "subsets"),
    [(1 << 32, 1, ["a"]), (1, 1 << 32, ["a"]), (1, 1, [str(n) for n in range((1 << 16) + 1)])],
)
def test_what_does_not_fit_the_index_is_refused(
    tmp_path: Path, line: int, size: int, subsets: list[str]
) -> None:
    """A line that wrapped around would name another document."""
    rows = len(subsets)
    with (
        BinWriter(tmp_path, "train", "07", DATASET) as writer,
        pytest.raises(TokenBinError, match=r"07: .* fit the index"),
    ):
        writer.append(*flat([[97]] * rows), [line] * rows, [size] * rows, subsets)


def test_a_writer_that_is_left_takes_its_files_along(tmp_path: Path) -> None:
    """A bin that looks finished and is not would be trained on."""
    with BinWriter(tmp_path, "train", "07", DATASET) as writer:
        writer.append(*flat([[97]]), [1], [1], ["a"])
        writer.reject(2, 30, "not JSON")
    assert list((tmp_path / "train").iterdir()) == []


def test_a_rebuilt_bin_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Rejects of the shard's earlier content would be blamed on the new one."""
    for text, rejects in (([97], 1), ([98, 99], 0)):
        with BinWriter(tmp_path, "train", "07", DATASET) as writer:
            writer.append(*flat([text]), [1], [1], ["a"])
            for _ in range(rejects):
                writer.reject(2, 30, "not JSON")
            writer.finish(None, "by hand", {})
        paths = BinPaths(tmp_path, "train", "07")
        assert paths.rejects.exists() == bool(rejects)
    assert read_receipt(paths.receipt).tokens == 3


def test_a_dataset_made_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    """Bins of two tokenizers in one folder are worth nothing."""
    create_dataset(tmp_path, DATASET, TOKENIZER)
    create_dataset(tmp_path, DATASET, TOKENIZER)
    for changes in ({"vocab_size": 300}, {"holdout": 0.1}, {"repair": True}, {"dtype": "uint32"}):
        other = bytes_dataset(**({"tokenizer_sha256": DATASET.tokenizer_sha256} | changes))
        with pytest.raises(TokenBinError, match=f"made with {next(iter(changes))} "):
            create_dataset(tmp_path, other, TOKENIZER)
    assert read_dataset(tmp_path) == DATASET


def test_many_may_found_one_dataset(tmp_path: Path) -> None:
    """The jobs of an array start at the same second."""
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(create_dataset, tmp_path, DATASET, TOKENIZER) for _ in range(24)]:
            done.result()
    assert {path.name for path in tmp_path.iterdir()} == {"dataset.json", "tokenizer.json"}


def test_the_first_of_many_writes_a_file_and_what_killed_ones_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hard links or without: two owners of a lock would mix their bytes."""
    for links in (True, False):
        if not links:
            monkeypatch.setattr("os.link", refuse_link)
        path = tmp_path / f"{links}.lock"
        path.with_name(f"{path.name}.0123abcd").touch()
        with ThreadPoolExecutor(8) as pool:
            contents = [str(n).encode() for n in range(24)]
            written = list(pool.map(partial(write_exclusively, path), contents))
        assert sum(written) == 1
        assert path.read_bytes() == contents[written.index(True)]
        assert {found.name for found in tmp_path.glob(f"{links}*")} == {path.name}


def refuse_link(*_: object) -> None:
    """As a file system without hard links does."""
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"dtype": "int16"}, "expected uint16 or uint32"),
        ({"vocab_size": "257"}, "vocab_size: found '257', expected int"),
        ({"colour": 1}, "unknown fields: colour"),
    ],
)
def test_a_damaged_dataset_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """Half understood, it would be misread."""
    create_dataset(tmp_path, DATASET, TOKENIZER)
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TokenBinError, match=message):
        read_dataset(tmp_path)
    path.write_text("{")
    with pytest.raises(TokenBinError, match="not JSON"):
        read_dataset(tmp_path)
    path.unlink()
    with pytest.raises(TokenBinError, match="no such file"):
        read_dataset(tmp_path)


def test_a_bin_of_another_size_than_told_is_refused(folder: Path) -> None:
    """A file that was cut off while copying would be read past its end."""
    write(folder, [[[97, 98]]], shard="08")
    path = BinPaths(folder, "train", "08").bin
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(TokenBinError, match=r"08\.bin: 4 bytes, but its receipt says 3 tokens"):
        TokenBins(folder, "train", "08")


def test_windows_are_read_from_any_bin(folder: Path) -> None:
    """The trainer sees the corpus through this."""
    write(folder, [[list(range(50))]], shard="10")
    write(folder, [[list(range(100, 150))]], shard="11")
    bins = TokenBins(folder, "train", "10-11")
    windows = bins.read_windows(np.array([1, 0, 1]), np.array([0, 5, 47]), 4)
    assert windows.tolist() == [[100, 101, 102, 103], [5, 6, 7, 8], [147, 148, 149, 256]]
