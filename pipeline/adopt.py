"""Taking in a bare bin: tokens that some other program wrote, such as nanoGPT's train.bin.

One pass copies it, looks at every id and finds where documents end. Its tokens say nothing of
lines and subsets: a document's line is its ordinal, its subset unknown, its bytes those that its
tokens stand for. What follows the last end-of-text is one more document, marked as unended.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.bpe import BPE, token_bytes
from pipeline.documents import UNKNOWN_SUBSET
from pipeline.lock import held
from pipeline.plan import choose_dtype, new_dataset
from pipeline.tokenbin import (
    DOCUMENT,
    UNENDED,
    BinPaths,
    Counts,
    Dataset,
    Receipt,
    Split,
    TokenBinError,
    TokenRangeError,
    create_dataset,
    docs_header,
    naming,
    partial,
    publish,
    read_dataset,
    sha256_of,
    write_receipt,
)

BLOCK_BYTES = 1 << 24


def adopt(directory: Path, split: Split, file: Path, bpe: BPE) -> Receipt:
    """Copy a bare bin into a dataset, which is founded if there is none, as its stem's bin.

    Raises:
        TokenRangeError: an id has no place in the vocabulary.
        TokenBinError: the file is not there or no whole number of tokens, the dataset has
            another tokenizer, or a bin of that name.
    """
    dataset = _dataset(directory, bpe)
    paths = BinPaths(directory, split, file.stem)
    if not file.is_file():
        raise TokenBinError(f"{file}: there is no such file")
    itemsize = dataset.token_dtype.itemsize
    if (size := file.stat().st_size) % itemsize:
        raise TokenBinError(
            f"{file}: {size:,} bytes are no whole number of tokens of {itemsize} ({dataset.dtype}, "
            f"by the vocabulary of {dataset.vocab_size:,})"
        )
    with held(paths.bin.with_suffix(".lock")):
        if paths.receipt.exists():
            raise TokenBinError(f"{paths.receipt}: there is a bin of that name: rename {file}")
        try:
            receipt = _copy(file, paths, dataset, token_bytes(bpe))
        finally:
            for path in (paths.bin, paths.docs):
                partial(path).unlink(missing_ok=True)
        if not (directory / "dataset.json").exists():
            create_dataset(directory, dataset, bpe.content)
        write_receipt(paths.receipt, receipt)
    return receipt


def _dataset(directory: Path, bpe: BPE) -> Dataset:
    """The dataset that is there, or the one to found once the bin proves good."""
    if not (directory / "dataset.json").exists():
        return new_dataset(bpe, choose_dtype(bpe, "auto"), holdout=0.0)
    dataset = read_dataset(directory)
    if dataset.tokenizer_sha256 != bpe.sha256:
        raise TokenBinError(
            f"{directory / 'dataset.json'}: made with tokenizer {dataset.tokenizer_sha256}, this "
            f"one is {bpe.sha256}: give the same, or another directory"
        )
    return dataset


def _copy(
    file: Path, paths: BinPaths, dataset: Dataset, bytes_of_id: NDArray[np.uint32]
) -> Receipt:
    sha256, max_id, num_tokens = hashlib.sha256(), -1, 0
    ends: list[NDArray[np.int64]] = []  # of the documents, in tokens
    text_bytes: list[NDArray[np.int64]] = []  # up to those places
    num_bytes = 0
    with naming(paths.bin), partial(paths.bin).open("wb") as target:
        with file.open("rb") as source:
            while content := source.read(BLOCK_BYTES):
                ids = np.frombuffer(content, dataset.token_dtype)
                outside = np.flatnonzero(ids >= dataset.vocab_size)
                if outside.size:
                    raise TokenRangeError(
                        f"{file}: token {num_tokens + outside[0]:,} has id {ids[outside[0]]}, but "
                        f"the vocabulary has {dataset.vocab_size:,}: was another tokenizer used?"
                    )
                places = np.flatnonzero(ids == dataset.end_of_text_id)
                each = bytes_of_id[ids].astype(np.int64)
                each[places] = 0  # end-of-text is no text
                sums = num_bytes + np.cumsum(each)
                ends.append(places + num_tokens + 1)
                text_bytes.append(sums[places])
                num_bytes = int(sums[-1])
                num_tokens += len(ids)
                max_id = max(max_id, int(ids.max()))
                sha256.update(content)
                target.write(content)
        publish(target, paths.bin)
    rows = _index(ends, text_bytes, num_tokens, num_bytes)
    with partial(paths.docs).open("wb") as docs:
        docs.write(docs_header(len(rows)))
        docs.write(rows.tobytes())
        publish(docs, paths.docs)
    counts = Counts(documents=len(rows), tokens=num_tokens, text_bytes=num_bytes)
    return Receipt(
        shard=paths.shard,
        split=paths.split,
        source=None,
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=counts.text_bytes,
        max_id=max_id,
        subsets={UNKNOWN_SUBSET: counts} if len(rows) else {},
        rejects={},
        sha256={"bin": sha256.hexdigest(), "docs": sha256_of(paths.docs)},
        encoder="unknown: adopted",
        versions={},
    )


def _index(
    ends: list[NDArray[np.int64]],
    text_bytes: list[NDArray[np.int64]],
    num_tokens: int,
    num_bytes: int,
) -> NDArray[np.void]:
    """DOCUMENT rows from where documents end and how many bytes of text stand before."""
    end_token = np.concatenate([*ends, np.zeros(0, np.int64)])
    end_byte = np.concatenate([*text_bytes, np.zeros(0, np.int64)])
    unended = num_tokens > (end_token[-1] if end_token.size else 0)
    if unended:
        end_token, end_byte = np.append(end_token, num_tokens), np.append(end_byte, num_bytes)
    each = np.diff(end_byte, prepend=0)
    if each.size and each.max() > np.iinfo(DOCUMENT["text_bytes"]).max:
        raise TokenBinError(
            f"a document of {each.max():,} bytes does not fit the index: is end-of-text "
            f"the token that ends documents here?"
        )
    rows = np.zeros(len(end_token), DOCUMENT)
    rows["end_token"] = end_token
    rows["line"] = np.arange(1, len(rows) + 1)
    rows["text_bytes"] = each
    if unended:
        rows["flags"][-1] = UNENDED
    return rows
