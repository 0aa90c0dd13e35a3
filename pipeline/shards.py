"""Shards: which ones there are, and their documents, read once from the first byte to the last.

A shard is a `.jsonl` or `.jsonl.zst` file in DATA or DATA/train, called by its stem. What is
damaged is an error and never a shorter shard: a zstd frame has to end, its checksum to agree, and
what follows it to be another frame or the end of the file; and the file has to stay what it was
while it is read. Memory is bounded by the largest
document (and by the window that a frame asks for).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import zstandard

from pipeline.documents import RejectError, parse
from pipeline.tokenbin import Source, StaleError, pick_shards, shard_key

SUFFIXES = (".jsonl.zst", ".jsonl")
NEVER_TRAINED_ON = ("val", "test")
BATCH_BYTES = 1 << 19  # of lines in a batch; a longer document makes a batch of its own

_CHUNK_BYTES = 1 << 20
_LARGEST_FEED, _SMALLEST_FEED = 1 << 14, 1 << 9
_LARGEST_WINDOW = 1 << 31
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ShardError(Exception):
    """A shard cannot be read, or two files claim to be it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """An input file and the name by which it goes: its stem, `07`."""

    name: str
    path: Path

    @property
    def num_bytes(self) -> int:
        """The size of the file as it lies there, compressed or not."""
        return self.path.stat().st_size

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".zst"


# ------------------------------------------------------------------ which shards there are


def find_shards(data: Path, wanted: str = "all") -> list[Shard]:
    """The shards to train on, in name order.

    Args:
        data: the folder; the shards lie in it or in its `train` folder.
        wanted: `00-29`, `0-3`, `00,02,05-07`, names, or `all`. Numbers match stems by value.

    Raises:
        ShardError: two files go by the same number.
        TokenBinError: one is not there.
    """
    if held_back := set(NEVER_TRAINED_ON) & {item.strip() for item in wanted.split(",")}:
        raise ShardError(f"--shards {wanted}: the {held_back.pop()} file is never trained on")
    present = _present(data)
    names = [shard.name for shards in present.values() for shard in shards]
    chosen: list[Shard] = []
    for key in pick_shards(wanted, names, data):
        first, *others = present[key]
        if others:
            raise ShardError(
                f"{data}: {', '.join(str(shard.path) for shard in (first, *others))} "
                f"go by the same number or name: keep one of them"
            )
        chosen.append(first)
    return sorted(chosen, key=lambda shard: shard.name)


def find_validation(data: Path) -> Shard | None:
    """DATA's `val.jsonl.zst` or `val.jsonl`, if there is one."""
    found = [data / f"val{suffix}" for suffix in SUFFIXES if (data / f"val{suffix}").is_file()]
    if len(found) > 1:
        raise ShardError(f"{data}: {found[0].name} and {found[1].name} are both there: keep one")
    return Shard("val", found[0]) if found else None


def _present(data: Path) -> dict[int | str, list[Shard]]:
    """What may be trained on, by number or name."""
    if not data.is_dir():
        raise ShardError(f"{data}: there is no such folder, expected the one with the shards")
    present: dict[int | str, list[Shard]] = {}
    for folder in (data, data / "train"):
        for path in sorted(folder.glob("*.jsonl*")):
            suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
            if suffix is None or path.name.startswith("."):
                continue
            if not path.is_file():
                raise ShardError(f"{path}: named like a shard, but no file: mend or remove it")
            name = path.name.removesuffix(suffix)
            if name not in NEVER_TRAINED_ON:
                present.setdefault(shard_key(name), []).append(Shard(name, path))
    if not present:
        raise ShardError(f"{data}: no {' or '.join(SUFFIXES)} files in it or in its train folder")
    return present


# ------------------------------------------------------------------ reading one


class Reject(NamedTuple):
    """A line that holds no document."""

    line: int
    byte: int  # where the line starts in the decompressed shard
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place between two lines of a shard, and what lies before it."""

    line: int = 0  # so many lines
    byte: int = 0  # of the decompressed shard
    documents: int = 0
    rejects: int = 0
    source_bytes: int = 0  # of the file as it lies there, read so far
    source_sha256: str = ""  # of those


START = Place()


@dataclass(slots=True)
class Batch:
    """Documents in the order of the shard, column by column, and the rejects among them."""

    texts: list[str] = field(default_factory=list[str])
    lines: list[int] = field(default_factory=list[int])  # from 1, blank lines counted
    subsets: list[str] = field(default_factory=list[str])
    rejects: list[Reject] = field(default_factory=list[Reject])
    end: Place | None = None  # None for the last batch: nothing follows

    def add(self, text: str, line: int, subset: str) -> None:
        self.texts.append(text)
        self.lines.append(line)
        self.subsets.append(subset)

    @property
    def text_bytes(self) -> list[int]:
        """Of each text in UTF-8. Ask after encoding: a text keeps its UTF-8 once it was made."""
        return [len(text) if text.isascii() else len(text.encode()) for text in self.texts]


class ShardReader:
    """Reads a shard in batches of documents: `for batch in reader`, once.

    Args:
        start: where an earlier reader's batch ended; the first one here follows on it.

    Raises:
        ShardError: while reading, if the file is cut off, damaged, empty, or not zstd, or if it
            changes meanwhile.
        StaleError: before the first batch, if what lies before `start` is not what it was.
    """

    def __init__(
        self,
        shard: Shard,
        repair: bool = False,
        batch_bytes: int = BATCH_BYTES,
        start: Place = START,
    ) -> None:
        self.shard = shard
        self.source_bytes = 0  # of the file as it lies there, read so far
        self.num_documents = start.documents
        self.num_rejects = start.rejects
        self._start = start
        self._repair = repair
        self._batch_bytes = batch_bytes
        self._sha256 = hashlib.sha256()

    @property
    def source(self) -> Source:
        """What was read, once all of it was."""
        return Source(
            name=self.shard.path.name, size=self.source_bytes, sha256=self._sha256.hexdigest()
        )

    def __iter__(self) -> Iterator[Batch]:
        batch, batch_bytes = Batch(), 0
        line_number, byte = self._start.line, self._start.byte
        for lines, opens in self._lines_from_start():
            for line in lines:
                line_number += 1
                line_byte, byte = byte, byte + len(line) + 1
                batch_bytes += len(line)
                try:
                    found = parse(
                        line.removeprefix(_BYTE_ORDER_MARK) if opens else line, self._repair
                    )
                except RejectError as error:
                    batch.rejects.append(Reject(line_number, line_byte, str(error)))
                    self.num_rejects += 1
                else:
                    if found:
                        batch.add(found[0], line_number, found[1])
                        self.num_documents += 1
                opens = False
                if batch_bytes >= self._batch_bytes:
                    batch.end = self._place(line_number, byte)
                    yield batch
                    batch, batch_bytes = Batch(), 0
        yield batch

    def _place(self, line: int, byte: int) -> Place:
        return Place(
            line=line,
            byte=byte,
            documents=self.num_documents,
            rejects=self.num_rejects,
            source_bytes=self.source_bytes,
            source_sha256=self._sha256.hexdigest(),
        )

    def _lines_from_start(self) -> Iterator[tuple[list[bytes], bool]]:
        """The lines after `start`. A frame is read from its first byte or not at all, so those
        before it are read too; nothing is looked for in them.
        """
        source = self._lines()
        line, byte = 0, 0
        rest: list[bytes] = []
        while line < self._start.line:
            lines, _ = next(source, ([], False))
            passed = lines[: self._start.line - line]
            rest = lines[len(passed) :]
            line += len(passed)
            byte += sum(map(len, passed)) + len(passed)
            if not passed:
                break
        if line and self._place(line, byte) != self._start:
            raise StaleError(f"{self.shard.path}: it is not the file it was, up to line {line:,}")
        if rest:
            yield rest, False
        yield from source

    def _lines(self) -> Iterator[tuple[list[bytes], bool]]:
        """Whole lines, and whether the first of them opens a file or a frame."""
        pending: list[bytes] = []
        opening = False
        for block, opens in self._frames() if self.shard.compressed else self._plain():
            opening = opening or (opens and not pending)
            lines = block.split(b"\n")  # no other character ends a line
            rest = lines.pop()
            if lines:
                lines[0] = b"".join((*pending, lines[0]))
                pending.clear()
                yield lines, opening
                opening = False
            if rest:
                pending.append(rest)
        if pending:
            yield [b"".join(pending)], opening

    def _plain(self) -> Iterator[tuple[bytes, bool]]:
        opens = True
        for chunk in self._chunks():
            yield chunk, opens
            opens = False

    def _frames(self) -> Iterator[tuple[bytes, bool]]:
        """What the zstd frames hold, in blocks, and whether a block is the first of its frame."""
        decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        frame, frame_byte, opens, head = None, 0, True, b""
        feed = _SMALLEST_FEED
        for chunk in self._chunks():
            chunk_byte = self.source_bytes - len(chunk)
            place = 0
            while place < len(chunk):
                piece = chunk[place : place + feed]
                if frame is None:
                    frame, frame_byte, opens = (
                        decompressor.decompressobj(),
                        chunk_byte + place,
                        True,
                    )
                    head = piece[:16]
                try:
                    block = frame.decompress(piece)
                except zstandard.ZstdError as error:
                    reason = str(error).removeprefix("zstd decompressor error: ")
                    raise ShardError(
                        f"{self.shard.path}: damaged, or no zstd frame, at byte {frame_byte:,} "
                        f"({reason}; it starts with {head!r}): get the file again"
                    ) from None
                place += len(piece) - len(frame.unused_data)
                if frame.eof:
                    frame = None
                # A few bytes can hold a gigabyte of repetition, and all of it comes at once.
                calm = len(block) < 64 * _LARGEST_FEED
                feed = min(2 * feed, _LARGEST_FEED) if calm else _SMALLEST_FEED
                if block:
                    yield block, opens
                    opens = False
        if frame is not None:
            raise ShardError(
                f"{self.shard.path}: cut off inside the zstd frame that starts at byte "
                f"{frame_byte:,} (the file has {self.source_bytes:,} bytes): get the file again"
            )

    def _chunks(self) -> Iterator[bytes]:
        """The file as it lies there, counted and hashed on the way."""
        with self.shard.path.open("rb") as file:
            before = os.fstat(file.fileno())
            while chunk := file.read(_CHUNK_BYTES):
                self.source_bytes += len(chunk)
                self._sha256.update(chunk)
                yield chunk
        after = self.shard.path.stat()
        if self.source_bytes != before.st_size or (after.st_size, after.st_mtime_ns) != (
            before.st_size,
            before.st_mtime_ns,
        ):
            raise ShardError(
                f"{self.shard.path}: it changed while it was read ({before.st_size:,} bytes, then "
                f"{after.st_size:,}): is it still being written? run again when it is whole"
            )
        if not self.source_bytes:
            raise ShardError(
                f"{self.shard.path}: an empty file, expected at least a zstd frame or a line: "
                f"get the file again"
            )
