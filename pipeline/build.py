"""One shard to its bins: the train bin and, with a hold-out, the val bin of the same name.

A job is idempotent. It returns at once when its receipts are valid, by make's rule: the bins are
there in the sizes that the receipts tell, and the source is the file they tell of: of the same
size and not newer, or newer with the same content. Everything else is built anew. What fails or
is killed leaves no file under a final name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import zstandard

from pipeline.bpe import Encoder
from pipeline.lock import held
from pipeline.shards import Batch, Reject, Shard, ShardError, ShardReader
from pipeline.tokenbin import (
    BinPaths,
    BinWriter,
    Dataset,
    Split,
    TokenBinError,
    docs_bytes,
    read_receipt,
    sha256_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A shard to build, and what with."""

    shard: Shard
    split: Split  # of the shard's documents, but for those that the hold-out takes
    directory: Path
    dataset: Dataset

    @property
    def outputs(self) -> tuple[BinPaths, ...]:
        """The bins that the job writes."""
        held_out = self.split == "train" and self.dataset.holdout > 0
        splits: tuple[Split, ...] = ("train", "val") if held_out else (self.split,)
        return tuple(BinPaths(self.directory, split, self.shard.name) for split in splits)


class Update(NamedTuple):
    """How far a job has come."""

    shard: str
    documents: int
    text_bytes: int
    source_bytes: int  # of the shard's file as it lies there


def is_built(job: Job) -> bool:
    """Whether there is nothing to do, by sizes and times alone."""
    return _sizes_agree(job) and not _source_is_newer(job)


def build(job: Job, encoder: Encoder, report: Callable[[Update], None]) -> None:
    """Write the bins of a shard, unless they are there.

    Raises:
        ShardError: the shard is damaged, or too many of its lines are no documents.
        TokenRangeError: the tokenizer gave an id outside the vocabulary.
        LockedError: another process is building this shard.
        OSError: a file cannot be read or written.
    """
    with held(job.outputs[0].bin.with_suffix(".lock")):
        if not (is_built(job) or _newer_but_equal(job)):
            _build(job, encoder, report)


def _build(job: Job, encoder: Encoder, report: Callable[[Update], None]) -> None:
    dataset = job.dataset
    reader = ShardReader(job.shard, repair=dataset.repair)
    text_bytes = 0
    first_rejects: list[Reject] = []
    with ExitStack() as stack:
        writers = [
            stack.enter_context(BinWriter(job.directory, out.split, out.shard, dataset))
            for out in job.outputs
        ]
        for batch in reader:
            parts = _parted(batch, dataset.holdout) if len(writers) > 1 else [batch]
            for writer, part in zip(writers, parts, strict=True):
                ids, lengths = encoder.encode_batch(part.texts)
                writer.append(ids, lengths, part.lines, part.text_bytes, part.subsets)
            for reject in batch.rejects:
                writers[0].reject(*reject)
            first_rejects += batch.rejects[: 3 - len(first_rejects)]
            text_bytes += sum(batch.text_bytes)
            report(Update(job.shard.name, reader.num_documents, text_bytes, reader.source_bytes))
        _require_few_rejects(reader, first_rejects, dataset.max_reject_share)
        for writer in writers:
            writer.finish(reader.source, encoder.name, _versions())


def held_out(text: str, holdout: float) -> bool:
    """Whether a text goes to validation: all copies of it go the same way."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < holdout * 2**64


def _parted(batch: Batch, holdout: float) -> Iterator[Batch]:
    """What stays in training, and what is held out."""
    mask = [held_out(text, holdout) for text in batch.texts]
    for wanted in (False, True):
        part = Batch()
        rows = zip(batch.texts, batch.lines, batch.subsets, mask, strict=True)
        for text, line, subset, taken in rows:
            if taken == wanted:
                part.add(text, line, subset)
        yield part


def _require_few_rejects(reader: ShardReader, first: list[Reject], allowed: float) -> None:
    rows = reader.num_documents + reader.num_rejects
    if reader.num_rejects <= allowed * rows:
        return
    name = reader.shard.name
    listed = "; ".join(f"{name}:{reject.line}: {reject.reason}" for reject in first)
    raise ShardError(
        f"{reader.shard.path}: {reader.num_rejects:,} of {rows:,} lines are no documents, "
        f"{reader.num_rejects / rows:.2%} where --max-reject-share allows {allowed:.2%}: {listed}"
    )


def _versions() -> dict[str, str]:
    """What else has a part in the bytes."""
    return {
        "numpy": np.__version__,
        "orjson": orjson.__version__,
        "zstandard": zstandard.__version__,
    }


# ------------------------------------------------------------------ is it built already?


def _sizes_agree(job: Job) -> bool:
    for out in job.outputs:
        try:
            receipt = read_receipt(out.receipt)
            bin_bytes, index_bytes = out.bin.stat().st_size, out.docs.stat().st_size
        except (TokenBinError, FileNotFoundError):
            return False
        source = receipt.source
        if (
            source is None
            or (source.name, source.size) != (job.shard.path.name, job.shard.num_bytes)
            or bin_bytes != receipt.tokens * job.dataset.token_dtype.itemsize
            or index_bytes != docs_bytes(receipt.documents)
        ):
            return False
    return True


def _source_is_newer(job: Job) -> bool:
    time = job.shard.path.stat().st_mtime_ns
    return any(time > out.receipt.stat().st_mtime_ns for out in job.outputs)


def _newer_but_equal(job: Job) -> bool:
    """The source was touched or copied: its content tells. If it is the same, so does its time."""
    if not _sizes_agree(job):
        return False
    sha256 = sha256_of(job.shard.path)
    for out in job.outputs:
        source = read_receipt(out.receipt).source
        if source is None or source.sha256 != sha256:
            return False
    for out in job.outputs:
        out.receipt.touch()
    return True
