"""The journal of an unfinished shard: what of it is safe on the disk, and what it was made with.

It is written, whole, after what it tells of has reached the disk, and removed when the shard is
finished. So a build that is killed at any moment can be gone on with from the last journal: the
shard is read again to the place named there, everything beyond the committed content is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from pipeline.shards import Place
from pipeline.tokenbin import (
    FORMAT_VERSION,
    BinWriter,
    Committed,
    Dataset,
    StaleError,
    TokenBinError,
    read_record,
    sync_directory,
    to_json,
    write_whole,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What has a part in a shard's bytes: under another, nothing is gone on with."""

    source: str  # the file's name
    dataset: Dataset
    encoder: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """`07.journal`: from where on a shard is still to be built."""

    format_version: int = FORMAT_VERSION
    making: Making
    end: Place  # of what was committed
    bins: dict[str, Committed]  # by split


def read_journal(path: Path, making: Making) -> Journal | None:
    """What an earlier build of the shard has left to go on from, if it was made the same way.

    Raises:
        StaleError: it was not, or the journal cannot be read.
    """
    if not path.exists():
        return None
    try:
        journal = read_record(path, Journal)
    except TokenBinError as error:
        raise StaleError(str(error)) from None
    if journal.making.dataset != making.dataset:
        raise StaleError(f"{path}: made with another dataset.json")
    for field in fields(Making):
        have, want = getattr(journal.making, field.name), getattr(making, field.name)
        if have != want:
            raise StaleError(f"{path}: made with {field.name} {have}, this run has {want}")
    return journal


def commit(path: Path, making: Making, end: Place, writers: Sequence[BinWriter]) -> None:
    """Make what was written until `end` safe from whatever happens next."""
    bins = {writer.split: writer.commit() for writer in writers}
    for writer in writers:
        sync_directory(writer.directory)
    write_whole(path, to_json(Journal(making=making, end=end, bins=bins)))
    sync_directory(path.parent)
