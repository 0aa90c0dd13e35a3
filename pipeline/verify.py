"""Re-reading a dataset: every byte of its bins against what the receipts and the index say."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.bpe import TokenizerError, load
from pipeline.tokenbin import (
    DOCUMENT,
    UNENDED,
    BinPaths,
    Counts,
    Dataset,
    Receipt,
    Split,
    TokenBinError,
    built,
    read_dataset,
    read_receipt,
    sha256_of,
)

BLOCK_BYTES = 1 << 24
SPLITS: tuple[Split, ...] = ("train", "val")
_KNOWN_FLAGS = 1 | UNENDED


def faults(directory: Path) -> Iterator[str]:
    """What is wrong with a dataset, a line each, as it is found.

    Raises:
        TokenBinError: there is no dataset that could be looked at.
    """
    dataset = read_dataset(directory)
    yield from _tokenizer_faults(directory, dataset)
    if not built(directory, "train"):
        yield f"{directory / 'train'}: no bins"
    for split in SPLITS:
        for shard in built(directory, split):
            paths = BinPaths(directory, split, shard)
            try:
                yield from _bin_faults(paths, read_receipt(paths.receipt), dataset)
            except (TokenBinError, OSError) as error:
                yield str(error)


def source_faults(directory: Path, data: Path) -> Iterator[str]:
    """Which bins were made from other shards than those in DATA, a line each.

    A frame of zstd without a checksum, as The Pile's are, can be damaged and still be read: then
    only the hash of its file tells that its text is another.
    """
    hash_of = cache(sha256_of)  # a hold-out makes two bins from one shard
    for split in SPLITS:
        for shard in built(directory, split):
            receipt = BinPaths(directory, split, shard).receipt
            source = read_receipt(receipt).source
            if source is None:  # an adopted bin
                continue
            places = (folder / source.name for folder in (data, data / "train"))
            path = next((place for place in places if place.is_file()), None)
            if path is None:
                yield f"{receipt}: made from {source.name}, which is not in {data}"
            elif (size := path.stat().st_size) != source.size:
                yield f"{path}: {size:,} bytes, but {receipt} was made from {source.size:,}"
            elif (sha256 := hash_of(path)) != source.sha256:
                yield f"{path}: sha256 {sha256}, but {receipt} was made from {source.sha256}"


def strays(directory: Path) -> list[Path]:
    """Files beside the bins that belong to none: what a killed build left, or a bare bin."""
    found: list[Path] = []
    for split in SPLITS:
        known: set[Path] = set()
        for shard in built(directory, split):
            paths = BinPaths(directory, split, shard)
            known |= {paths.bin, paths.docs, paths.receipt, paths.rejects}
        found += sorted(set((directory / split).glob("*")) - known)
    return found


def _tokenizer_faults(directory: Path, dataset: Dataset) -> Iterator[str]:
    path = directory / "tokenizer.json"
    try:
        bpe = load(path, dataset.end_of_text_token)
    except TokenizerError as error:
        yield str(error)
        return
    for name, found, expected in (
        ("sha256", bpe.sha256, dataset.tokenizer_sha256),
        ("vocabulary bound", bpe.vocab_size, dataset.vocab_size),
        ("end-of-text id", bpe.end_of_text_id, dataset.end_of_text_id),
    ):
        if found != expected:
            yield f"{path}: {name} {found}, but dataset.json says {expected}"


def _bin_faults(paths: BinPaths, receipt: Receipt, dataset: Dataset) -> Iterator[str]:
    if (receipt.shard, receipt.split) != (paths.shard, paths.split):
        yield f"{paths.receipt}: it is of {receipt.split}/{receipt.shard}"
    if (sha256 := sha256_of(paths.docs)) != receipt.sha256.get("docs"):
        yield f"{paths.docs}: sha256 {sha256}, but the receipt says {receipt.sha256.get('docs')}"
    rows = _read_index(paths)
    if len(rows) != receipt.documents:
        yield f"{paths.docs}: {len(rows):,} documents, but the receipt says {receipt.documents:,}"
    yield from _index_faults(paths, receipt, rows)
    yield from _token_faults(paths, receipt, rows, dataset)
    yield from _reject_faults(paths, receipt)


def _read_index(paths: BinPaths) -> NDArray[np.void]:
    try:
        rows = np.load(paths.docs, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise TokenBinError(f"{paths.docs}: not an index ({error})") from None
    if rows.dtype != DOCUMENT or rows.ndim != 1:
        raise TokenBinError(f"{paths.docs}: rows of {rows.dtype}, expected {DOCUMENT}")
    return rows


def _index_faults(paths: BinPaths, receipt: Receipt, rows: NDArray[np.void]) -> Iterator[str]:
    """The index in itself, and its sums against the receipt."""
    tokens = np.diff(rows["end_token"].astype(np.int64), prepend=0)
    for name, steps in (("end_token", tokens), ("line", np.diff(rows["line"].astype(np.int64)))):
        if (wrong := np.flatnonzero(steps <= 0)).size:
            yield f"{paths.docs}: {name} does not grow at document {wrong[0] + 1:,}"
    flags = rows["flags"].copy()
    if receipt.source is None and flags.size:
        flags[-1] &= ~np.uint8(UNENDED)  # the tail of an adopted bin, and nowhere else
    if (wrong := np.flatnonzero((flags & ~np.uint8(_KNOWN_FLAGS)) | (flags & UNENDED))).size:
        yield f"{paths.docs}: document {wrong[0] + 1:,} has flags {rows['flags'][wrong[0]]}"
    names = list(receipt.subsets)
    if (wrong := np.flatnonzero(rows["subset"] >= len(names))).size:
        number = rows["subset"][wrong[0]]
        yield f"{paths.docs}: document {wrong[0] + 1:,} is of subset {number} of {len(names)}"
        return
    columns = (np.ones(len(rows)), tokens, rows["text_bytes"])
    sums = [np.bincount(rows["subset"], column, len(names)).astype(np.int64) for column in columns]
    for index, name in enumerate(names):
        documents, num_tokens, text_bytes = (int(column[index]) for column in sums)
        found = Counts(documents=documents, tokens=num_tokens, text_bytes=text_bytes)
        if found != receipt.subsets[name]:
            yield f"{paths.docs}: {name}: {found}, but the receipt says {receipt.subsets[name]}"
    for field, column in zip(("documents", "tokens", "text_bytes"), sums, strict=True):
        if (total := int(column.sum())) != (told := getattr(receipt, field)):
            yield f"{paths.docs}: {total:,} {field} in all, but the receipt says {told:,}"


def _token_faults(
    paths: BinPaths, receipt: Receipt, rows: NDArray[np.void], dataset: Dataset
) -> Iterator[str]:
    """Every token: its range, and end-of-text where the index says that documents end."""
    itemsize = dataset.token_dtype.itemsize
    if (size := paths.bin.stat().st_size) != receipt.tokens * itemsize:
        yield (
            f"{paths.bin}: {size:,} bytes, but the receipt says {receipt.tokens:,} tokens of "
            f"{dataset.dtype} ({receipt.tokens * itemsize:,} bytes)"
        )
        return
    ended = rows["end_token"][(rows["flags"] & UNENDED) == 0]
    sha256, start, max_id = hashlib.sha256(), 0, -1
    num_ended, misplaced, outside = 0, "", ""
    with paths.bin.open("rb") as file:
        while content := file.read(BLOCK_BYTES):
            sha256.update(content)
            ids = np.frombuffer(content, dataset.token_dtype)
            max_id = max(max_id, int(ids.max()))
            if not outside and (wrong := np.flatnonzero(ids >= dataset.vocab_size)).size:
                outside = (
                    f"{paths.bin}: token {start + wrong[0]:,} has id {ids[wrong[0]]}, "
                    f"but the vocabulary has {dataset.vocab_size:,}"
                )
            ends = np.flatnonzero(ids == dataset.end_of_text_id) + start + 1
            told = ended[num_ended : num_ended + len(ends)]
            if not misplaced and not np.array_equal(ends[: len(told)], told):
                first = int(np.flatnonzero(ends[: len(told)] != told)[0])
                misplaced = (
                    f"{paths.bin}: document {num_ended + first + 1:,} ends after token "
                    f"{ends[first]:,}, but the index says after {told[first]:,}"
                )
            num_ended += len(ends)
            start += len(ids)
    if outside:
        yield outside
    if misplaced:
        yield misplaced
    if num_ended != len(ended):
        yield f"{paths.bin}: {num_ended:,} end-of-text ids for {len(ended):,} ended documents"
    if max_id != receipt.max_id:
        yield f"{paths.bin}: largest id {max_id}, but the receipt says {receipt.max_id}"
    if sha256.hexdigest() != receipt.sha256.get("bin"):
        yield (
            f"{paths.bin}: sha256 {sha256.hexdigest()}, but the receipt says "
            f"{receipt.sha256.get('bin')}"
        )


def _reject_faults(paths: BinPaths, receipt: Receipt) -> Iterator[str]:
    found: Counter[str] = Counter()
    if paths.rejects.exists():
        with paths.rejects.open("rb") as file:
            found.update(json.loads(line)["reason"] for line in file)
    if found != receipt.rejects:
        yield f"{paths.rejects}: {dict(found)}, but the receipt says {receipt.rejects}"
