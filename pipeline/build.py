"""One shard to its bins: the train bin and, with a hold-out, the val bin of the same name.

A job is idempotent. It returns at once when its receipts are valid, by make's rule: the bins are
there in the sizes that the receipts tell, and the source is the file they tell of: of the same
size and not newer, or newer with the same content. Everything else is built.

What fails or is killed leaves no file under a final name. On the way the job commits what it has:
killed at any moment, it goes on from there the next time, and its files come out the same. What
would fail in the same way again, as a damaged shard does, leaves nothing.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import zstandard

from pipeline.encoders import Encoder, ParityError, Tokens
from pipeline.journal import Journal, Making, commit, read_journal
from pipeline.lock import held, is_held
from pipeline.shards import BATCH_BYTES, START, Batch, Shard, ShardError, ShardReader
from pipeline.tokenbin import (
    BinPaths,
    BinWriter,
    Dataset,
    Split,
    StaleError,
    TokenBinError,
    docs_bytes,
    partial,
    read_receipt,
    remove_partial,
    sha256_of,
)

SECONDS_TO_COMMIT = 10.0  # of work that a kill can cost, at most

# By all of these a file cannot grow: the disk, one's share of it, the file system's or the
# process's limit for a file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


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

    @property
    def lock(self) -> Path:
        return self.outputs[0].bin.with_suffix(".lock")

    @property
    def journal(self) -> Path:
        return self.outputs[0].bin.with_suffix(".journal")


class Update(NamedTuple):
    """How far a job has come."""

    shard: str
    documents: int
    text_bytes: int
    source_bytes: int  # of the shard's file as it lies there


def is_built(job: Job) -> bool:
    """Whether there is nothing to do, by sizes and times alone."""
    return _sizes_agree(job) and not _source_is_newer(job) and not _left_behind(job)


def build(job: Job, encoder: Encoder, report: Callable[[Update], None]) -> None:
    """Write the bins of a shard, unless they are there; go on with what a killed build committed.

    Raises:
        ShardError: the shard is damaged, or too many of its lines are no documents.
        TokenRangeError: the tokenizer gave an id outside the vocabulary.
        TokenBinError: a bin of that name was adopted.
        ParityError: the encoder differs from its reference, and must not be replaced by it.
        LockedError: another process is building this shard.
        OSError: a file cannot be read or written.
    """
    try:
        with held(job.lock):
            if _sizes_agree(job) and (not _source_is_newer(job) or _newer_but_equal(job)):
                _clear_away(job)
            else:
                _spare_adopted(job)
                _build_on(job, encoder, report)
    except ParityError as error:
        if encoder.fallback is None:
            raise
        log.warning("%s: begun anew with the reference: %s", job.shard.name, error)
        build(job, encoder.fallback, report)


def _spare_adopted(job: Job) -> None:
    """Refuse to replace a bin that was taken in from elsewhere: no shard can bring it back."""
    for out in job.outputs:
        try:
            adopted = read_receipt(out.receipt).source is None
        except TokenBinError:  # none there, or damaged: it is built
            continue
        if adopted:
            raise TokenBinError(
                f"{out.bin}: adopted, and shard {job.shard.name} would replace it: remove "
                f"{out.receipt} if it may, or choose other --shards"
            )


def _build_on(job: Job, encoder: Encoder, report: Callable[[Update], None]) -> None:
    """Go on with what is committed, or begin; leave nothing but what can be gone on with."""
    making = Making(
        source=job.shard.path.name,
        dataset=job.dataset,
        encoder=encoder.name,
        versions=_versions(),
    )
    try:
        try:
            _build(job, making, encoder, report, read_journal(job.journal, making))
        except StaleError as error:
            log.warning("%s: begun anew: %s", job.shard.name, error)
            _clear_away(job)
            _build(job, making, encoder, report, None)
    except BaseException as error:
        fails_again = isinstance(error, (ParityError, ShardError, TokenBinError))
        if fails_again or not job.journal.exists():
            _clear_away(job)
        raise
    _clear_away(job)


def _build(
    job: Job,
    making: Making,
    encoder: Encoder,
    report: Callable[[Update], None],
    journal: Journal | None,
) -> None:
    dataset, start = job.dataset, journal.end if journal else START
    reader = ShardReader(job.shard, dataset.repair, BATCH_BYTES, start)
    with ExitStack() as stack:
        writers: list[BinWriter] = []
        for out in job.outputs:
            begun = journal.bins[out.split] if journal else None
            writer = BinWriter(job.directory, out.split, out.shard, dataset, begun)
            writers.append(stack.enter_context(writer))
        stack.enter_context(_room(job, reader, writers))
        if journal:
            log.info("%s: going on after line %s", job.shard.name, f"{start.line:,}")
        committed = time.monotonic()
        for batch, tokens in encoder.encode_shard(reader):
            whole = [(batch, tokens)]
            parts = whole if len(writers) == 1 else _parted(batch, tokens, dataset.holdout)
            for writer, (part, (ids, lengths)) in zip(writers, parts, strict=True):
                writer.append(ids, lengths, part.lines, part.text_bytes, part.subsets)
            for reject in batch.rejects:
                writers[0].reject(*reject)
            if batch.end and time.monotonic() - committed >= SECONDS_TO_COMMIT:
                commit(job.journal, making, batch.end, writers)
                committed = time.monotonic()
            text_bytes = sum(writer.text_bytes for writer in writers)
            report(Update(job.shard.name, reader.num_documents, text_bytes, reader.source_bytes))
        _require_few_rejects(reader, writers[0], dataset.max_reject_share)
        for writer in writers:
            writer.finish(reader.source, making.encoder, making.versions)


@contextmanager
def _room(job: Job, reader: ShardReader, writers: Sequence[BinWriter]) -> Generator[None]:
    """On a full disk, say what the shard needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        written = sum(writer.num_bytes for writer in writers)
        needed = written * job.shard.num_bytes / max(reader.source_bytes, 1)
        raise OSError(
            f"{error.filename}: {error.strerror}: the bins of {job.shard.name} take about "
            f"{needed / 1e6:,.1f} MB, of which {written / 1e6:,.1f} are written: make room and run "
            f"again"
        ) from None


def _clear_away(job: Job) -> None:
    """Remove what a build leaves until it is finished."""
    for path in (job.journal, partial(job.journal)):
        path.unlink(missing_ok=True)
    for out in job.outputs:
        remove_partial(out)


def held_out(text: str, holdout: float) -> bool:
    """Whether a text goes to validation: all copies of it go the same way."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < holdout * 2**64


def _parted(batch: Batch, tokens: Tokens, holdout: float) -> Iterator[tuple[Batch, Tokens]]:
    """What stays in training, and what is held out."""
    mask = np.array([held_out(text, holdout) for text in batch.texts], bool)
    of_ids = np.repeat(mask, tokens.lengths)
    for wanted in (False, True):
        part = Batch()
        for row in np.flatnonzero(mask == wanted).tolist():
            part.add(batch.texts[row], batch.lines[row], batch.subsets[row])
        yield part, Tokens(tokens.ids[of_ids == wanted], tokens.lengths[mask == wanted])


def _require_few_rejects(reader: ShardReader, writer: BinWriter, allowed: float) -> None:
    rows = reader.num_documents + reader.num_rejects
    if reader.num_rejects <= allowed * rows:
        return
    name = reader.shard.name
    listed = "; ".join(f"{name}:{row['line']}: {row['reason']}" for row in writer.rejects(3))
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


def _left_behind(job: Job) -> bool:
    """Whether a build was killed after its last receipt, before it had cleared away."""
    return not is_held(job.lock) and (job.lock.exists() or job.journal.exists())


def _newer_but_equal(job: Job) -> bool:
    """The source was touched or copied: its content tells. If it is the same, so does its time."""
    sha256 = sha256_of(job.shard.path)
    for out in job.outputs:
        source = read_receipt(out.receipt).source
        if source is None or source.sha256 != sha256:
            return False
    for out in job.outputs:
        out.receipt.touch()
    return True
