"""Token bins on disk: what a dataset directory holds, how its files appear, how they are read.

    BINS/dataset.json       what all bins share, fixed when the first shard is built
    BINS/tokenizer.json     byte for byte the tokenizer used
    BINS/train/07.bin       token ids, little-endian, nothing else
    BINS/train/07.docs.npy  one DOCUMENT row a document
    BINS/train/07.json      the receipt, written last: a bin without one does not exist
    BINS/train/07.rejects.jsonl   the lines that are no documents, if there are any

Files appear whole: they are written as `x.partial`, flushed to the disk and renamed. A writer can
commit what it has, for another to go on from. The trainer imports this module and nothing else of
the pipeline, so it needs numpy and the standard library only. docs/token-bins.md gives the format
byte by byte.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
DOCUMENT = np.dtype(
    [
        ("end_token", "<u8"),  # exclusive, counted from the start of the bin, end-of-text included
        ("line", "<u4"),  # as an editor counts it: from 1, blank lines too
        ("text_bytes", "<u4"),  # of the text in UTF-8
        ("subset", "<u2"),  # index into the receipt's subset names
        ("flags", "u1"),
    ]
)
UNENDED = 2  # flag: the document has no end-of-text (the tail of an adopted bin)

Split = Literal["train", "val"]
Record = TypeVar("Record")


class TokenBinError(Exception):
    """A dataset directory, a receipt or a bin is not what it should be."""


class TokenRangeError(TokenBinError):
    """A token id has no place in the vocabulary."""


class StaleError(TokenBinError):
    """What an earlier writer committed cannot be continued: something of it has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """`dataset.json`: what every bin of a directory was made with."""

    format_version: int = FORMAT_VERSION
    tokenizer_sha256: str
    vocab_size: int  # largest id the tokenizer can emit, plus 1
    dtype: str  # uint16 or uint32
    end_of_text_token: str
    end_of_text_id: int
    holdout: float  # share of the documents held out for validation
    subsets: tuple[str, ...] | None = None  # the subsets taken; None takes all
    fraction: float = 1.0  # share of each shard that is read
    text_field: str = "text"
    subset_field: str = "meta.pile_set_name"
    max_reject_share: float
    repair: bool

    @property
    def token_dtype(self) -> np.dtype:
        """The little-endian dtype of the bins."""
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The compressed file that a bin was made from."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a subset holds; `tokens` includes one end-of-text a document."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """`07.json`: what the bin of one shard holds. Equal inputs give equal receipts."""

    format_version: int = FORMAT_VERSION
    shard: str
    split: str
    source: Source | None  # None for an adopted bin
    documents: int
    tokens: int
    text_bytes: int
    max_id: int  # -1 for an empty bin
    subsets: dict[str, Counts]  # in the order in which the shard shows them
    rejects: dict[str, int]  # by reason
    sha256: dict[str, str]  # of "bin" and "docs"
    encoder: str
    versions: dict[str, str]


# ------------------------------------------------------------------ files that appear whole


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` durable, where the platform can."""
    if os.name == "nt":  # Windows opens no directories; its renames are journalled
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial(path: Path) -> Path:
    """Where the content of `path` is kept until it is whole."""
    return path.with_name(path.name + ".partial")


def flush(file: BinaryIO) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def publish(file: BinaryIO, path: Path) -> None:
    """Close the partial file and give it its final name."""
    with naming(path):
        flush(file)
        file.close()
    partial(path).replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    try:
        with naming(path), partial(path).open("wb") as file:
            file.write(content)
            publish(file, path)
    finally:
        partial(path).unlink(missing_ok=True)


def write_exclusively(path: Path, content: bytes) -> bool:
    """Write a small file whole, unless there is one: whether it was this call that wrote it."""
    mine = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists():
            return False
        with naming(path), mine.open("wb") as file:
            file.write(content)
            flush(file)
        return _link(mine, path)
    finally:
        mine.unlink(missing_ok=True)
        _sweep(path)


def _link(mine: Path, path: Path) -> bool:
    try:
        os.link(mine, path)
    except (FileExistsError, FileNotFoundError):
        return False
    except OSError:  # a file system without hard links: for a moment the file is empty
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        try:
            mine.replace(path)
        except FileNotFoundError:
            path.unlink()
            return False
    return True


def _sweep(path: Path) -> None:
    """Once there is a file, what killed processes left that wanted to write it is of no use.

    Somebody who is at work on his loses it too, and learns by it that he was not the first.
    """
    with suppress(OSError):  # the file was removed just now; or, on Windows, one to sweep is open
        if path.stat().st_size:
            for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}"):
                left.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Name the file in errors of writing it, as a full disk's: the system does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(record: Any) -> bytes:
    """A record of the format, as it lies in a file."""
    return (json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n").encode()


def read_record(path: Path, kind: type[Record]) -> Record:
    """The record in a JSON file, after a look at its format version.

    Raises:
        TokenBinError: it is not there, damaged, or of another format.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise TokenBinError(f"{path}: there is no such file: are the bins elsewhere?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenBinError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise TokenBinError(f"{path}: expected a JSON object, found {type(values).__name__}")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise TokenBinError(
            f"{path}: format version {version}, but this program reads version {FORMAT_VERSION}"
        )
    return _fit(values, kind, str(path))


_type_hints = cache(get_type_hints)  # it compiles each of them anew


def _fit(value: Any, kind: Any, where: str) -> Any:
    """`value` from JSON as the annotated `kind`: a record, or one of the few types they hold."""
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = _type_hints(kind)
        if value.keys() != hints.keys():
            odd = ", ".join(sorted(value.keys() ^ hints.keys()))
            raise TokenBinError(f"{where}: missing or unknown fields: {odd}")
        return kind(**{key: _fit(value[key], hints[key], f"{where}: {key}") for key in hints})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        inner = next(argument for argument in arguments if argument is not NoneType)
        return None if value is None else _fit(value, inner, where)
    if origin is dict and isinstance(value, dict):
        return {key: _fit(item, arguments[1], f"{where}: {key}") for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_fit(item, arguments[0], where) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TokenBinError(f"{where}: found {value!r}, expected {getattr(kind, '__name__', kind)}")
    return value


# ------------------------------------------------------------------ dataset.json


def read_dataset(directory: Path) -> Dataset:
    """What the bins of `directory` were made with.

    Raises:
        TokenBinError: no dataset is there, or its format is another.
    """
    path = directory / "dataset.json"
    dataset = read_record(path, Dataset)
    if dataset.dtype not in ("uint16", "uint32"):
        raise TokenBinError(f"{path}: dtype {dataset.dtype!r}, expected uint16 or uint32")
    return dataset


def create_dataset(directory: Path, dataset: Dataset, tokenizer: bytes) -> None:
    """Found the dataset, or make sure that the one already there is the same.

    Of several processes that start at once one creates the file, the others compare.

    Raises:
        TokenBinError: the directory holds a dataset made otherwise; the difference is named.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "dataset.json"
    write_exclusively(path, to_json(dataset))
    found = read_dataset(directory)
    for field in fields(Dataset):
        have, want = getattr(found, field.name), getattr(dataset, field.name)
        if have != want:
            raise TokenBinError(
                f"{path}: made with {field.name} {have!r}, this run has {want!r}: "
                f"give the same, or another directory"
            )
    copy = directory / "tokenizer.json"
    write_exclusively(copy, tokenizer)
    if (have := sha256_of(copy)) != dataset.tokenizer_sha256:
        raise TokenBinError(
            f"{copy}: sha256 {have}, expected {dataset.tokenizer_sha256} as dataset.json says"
        )


# ------------------------------------------------------------------ the files of one bin


@dataclass(frozen=True, slots=True)
class BinPaths:
    """Where the files of one bin are."""

    directory: Path
    split: Split
    shard: str

    @property
    def bin(self) -> Path:
        return self.directory / self.split / f"{self.shard}.bin"

    @property
    def docs(self) -> Path:
        return self.bin.with_suffix(".docs.npy")

    @property
    def receipt(self) -> Path:
        return self.bin.with_suffix(".json")

    @property
    def rejects(self) -> Path:
        return self.bin.with_suffix(".rejects.jsonl")


def read_receipt(path: Path) -> Receipt:
    """The receipt in `path`.

    Raises:
        TokenBinError: it is not there, damaged, or of another format.
    """
    return read_record(path, Receipt)


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Make a bin exist: its other files must be whole and in place."""
    write_whole(path, to_json(receipt))
    sync_directory(path.parent)


def remove_partial(paths: BinPaths) -> None:
    """Give up what a writer has not finished."""
    for path in (paths.bin, paths.docs, paths.rejects):
        partial(path).unlink(missing_ok=True)


def docs_header(num_documents: int) -> bytes:
    """The .npy header of that many DOCUMENT rows; its length does not depend on their number."""
    buffer = io.BytesIO()
    fact = {"descr": DOCUMENT.descr, "fortran_order": False, "shape": (num_documents,)}
    np.lib.format.write_array_header_1_0(buffer, fact)
    return buffer.getvalue()


def docs_bytes(num_documents: int) -> int:
    """The size of an index of that many documents."""
    return len(docs_header(num_documents)) + num_documents * DOCUMENT.itemsize


# ------------------------------------------------------------------ writing a bin


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far a file reaches, and the hash of that: its header is counted in neither."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What of a bin is safe on the disk, under partial names."""

    bin: Extent
    docs: Extent
    rejects: Extent
    max_id: int
    subsets: dict[str, Counts]
    reject_counts: dict[str, int]


class _GrowingFile:
    """A file under its partial name, and the hash of what was appended to it.

    Args:
        path: its final name.
        header: of fixed length, not counted and not hashed: the number of rows is known last.
        begun: how many bytes are there to go on from, and their hash object; None begins anew.
    """

    def __init__(
        self, path: Path, header: bytes = b"", begun: tuple[int, Any] | None = None
    ) -> None:
        self._path = path
        self.num_bytes, self._sha256 = begun or (0, hashlib.sha256())
        if self.num_bytes and not partial(path).exists():  # it was given its final name already
            path.replace(partial(path))
        self._file: BinaryIO = partial(path).open("r+b" if self.num_bytes else "wb")
        self._file.write(header)
        self._file.seek(len(header) + self.num_bytes)
        self._file.truncate()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def append(self, content: bytes | memoryview) -> None:
        with naming(self._path):
            self._file.write(content)
        self._sha256.update(content)
        self.num_bytes += len(content)

    def lines(self) -> Generator[bytes]:
        """What was appended, line by line."""
        self._file.flush()
        with partial(self._path).open("rb") as file:
            yield from file

    def commit(self) -> Extent:
        with naming(self._path):
            flush(self._file)
        return Extent(num_bytes=self.num_bytes, sha256=self.sha256)

    def publish(self, header: bytes = b"") -> None:
        self._file.seek(0)
        self._file.write(header)
        publish(self._file, self._path)

    def close(self) -> None:
        with suppress(OSError):  # on a full disk the rest of the buffer cannot be written
            self._file.close()


def _begun(path: Path, header: bytes, committed: Extent) -> tuple[int, Any]:
    """What `_GrowingFile` goes on from, if the file still begins with what was committed."""
    there = partial(path) if partial(path).exists() else path
    sha256, missing = hashlib.sha256(), committed.num_bytes
    if missing and there.exists():
        with there.open("rb") as file:
            file.seek(len(header))
            while content := file.read(min(missing, 1 << 20)):
                sha256.update(content)
                missing -= len(content)
    if missing or sha256.hexdigest() != committed.sha256:
        raise StaleError(
            f"{there}: it does not begin with the {committed.num_bytes:,} bytes committed"
        )
    return committed.num_bytes, sha256


class BinWriter:
    """Writes the files of one bin under partial names; `finish` makes them the bin.

    Used as a context manager: leaving it before `finish` removes the partial files, unless some
    of their content was committed.

    Args:
        committed: what an earlier writer of the same bin committed: this one goes on from there.

    Raises:
        StaleError: the files are not what was committed any more; nothing was changed.
    """

    def __init__(
        self,
        directory: Path,
        split: Split,
        shard: str,
        dataset: Dataset,
        committed: Committed | None = None,
    ) -> None:
        self.split: Split = split
        self._dataset = dataset
        self._shard = shard
        self._paths = BinPaths(directory, split, shard)
        self._paths.bin.parent.mkdir(parents=True, exist_ok=True)
        self._subset_index: dict[str, int] = {}
        self._counts = np.zeros((0, 3), np.int64)  # documents, tokens, text bytes of each subset
        self._reject_counts: dict[str, int] = {}
        self._max_id = -1
        self._kept = committed is not None
        self._files = self._create() if committed is None else self._take_up(committed)
        self._bin, self._docs, self._rejects = self._files
        self._documents, self._tokens, self._text_bytes = self._counts.sum(axis=0).tolist()

    def _create(self) -> list[_GrowingFile]:
        return [_GrowingFile(path, header) for path, header in self._layout]

    def _take_up(self, committed: Committed) -> list[_GrowingFile]:
        extents = (committed.bin, committed.docs, committed.rejects)
        places = zip(self._layout, extents, strict=True)
        begun = [_begun(path, header, extent) for (path, header), extent in places]
        if not partial(self._paths.bin).exists():  # this bin was finished, but not all of its job
            self._paths.receipt.unlink(missing_ok=True)
        self._subset_index = {name: index for index, name in enumerate(committed.subsets)}
        rows = [[c.documents, c.tokens, c.text_bytes] for c in committed.subsets.values()]
        self._counts = np.array(rows, np.int64).reshape(-1, 3)
        self._reject_counts = dict(committed.reject_counts)
        self._max_id = committed.max_id
        return [_GrowingFile(*place, part) for place, part in zip(self._layout, begun, strict=True)]

    @property
    def _layout(self) -> list[tuple[Path, bytes]]:
        """The files and their headers."""
        paths = self._paths
        return [(paths.bin, b""), (paths.docs, docs_header(0)), (paths.rejects, b"")]

    def __enter__(self) -> BinWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        if not self._kept:
            remove_partial(self._paths)

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return self._paths.bin.parent

    @property
    def text_bytes(self) -> int:
        """Of the documents so far."""
        return self._text_bytes

    @property
    def num_bytes(self) -> int:
        """Written so far, in all files."""
        return sum(file.num_bytes for file in self._files)

    def append(
        self,
        ids: NDArray[np.integer],
        lengths: NDArray[np.integer],
        lines: Sequence[int],
        text_bytes: Sequence[int],
        subsets: Sequence[str],
    ) -> None:
        """Add documents, each with its end-of-text.

        Args:
            ids: the tokens of all documents, one after another, without end-of-text; shape (sum,).
            lengths: how many tokens each document has; shape (documents,), as all that follow.
            lines: where each stands in the shard.
            text_bytes: the length of each text in UTF-8.
            subsets: the subset of each.

        Raises:
            TokenRangeError: an id is outside the vocabulary, or is end-of-text inside a document.
            TokenBinError: a number does not fit the documents index.
        """
        if not lines:
            return
        for name, column in (("line", lines), ("text_bytes", text_bytes)):
            if max(column) > np.iinfo(DOCUMENT[name]).max:
                raise TokenBinError(f"{self._shard}: {name} {max(column):,} does not fit the index")
        for name in subsets:
            self._subset_index.setdefault(name, len(self._subset_index))
        if len(self._subset_index) > np.iinfo(DOCUMENT["subset"]).max + 1:
            raise TokenBinError(f"{self._shard}: more than 65,536 subsets do not fit the index")
        ends = np.cumsum(lengths, dtype=np.int64)
        self._check(ids, ends, lines)
        end_of_text = self._dataset.end_of_text_id
        tokens = np.insert(ids, ends, end_of_text).astype(self._dataset.token_dtype)
        content = tokens.data.cast("B") if tokens.size else b""
        self._bin.append(content)

        rows = np.zeros(len(lines), DOCUMENT)
        rows["end_token"] = self._tokens + ends + np.arange(1, len(lines) + 1)
        rows["line"] = lines
        rows["text_bytes"] = text_bytes
        rows["subset"] = [self._subset_index[name] for name in subsets]
        self._docs.append(rows.tobytes())
        grown = np.zeros((len(self._subset_index), 3), np.int64)
        grown[: len(self._counts)] = self._counts
        added = np.stack([np.ones_like(lengths), lengths + 1, text_bytes], axis=1)
        np.add.at(grown, rows["subset"], added)
        self._counts = grown

        self._tokens += tokens.size
        self._documents += len(lines)
        self._text_bytes += sum(text_bytes)
        if tokens.size:
            self._max_id = max(self._max_id, int(tokens.max()))

    def _check(
        self, ids: NDArray[np.integer], ends: NDArray[np.int64], lines: Sequence[int]
    ) -> None:
        """Look at the ids before the cast, because a cast to uint16 turns 70000 into 4464."""
        vocab_size, end_of_text = self._dataset.vocab_size, self._dataset.end_of_text_id
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size) | (ids == end_of_text))
        if not bad.size:
            return
        document = int(np.searchsorted(ends, bad[0], side="right"))
        where = f"{self._shard}:{lines[document]}"
        if ids[bad[0]] == end_of_text:
            raise TokenRangeError(
                f"{where}: the tokenizer gave end-of-text (id {end_of_text}) inside a document"
            )
        raise TokenRangeError(
            f"{where}: token id {ids[bad[0]]}, but the vocabulary has {vocab_size:,}"
        )

    def reject(self, line: int, byte_offset: int, reason: str) -> None:
        """Note a line that is no document."""
        row = {"line": line, "byte": byte_offset, "reason": reason}
        self._rejects.append((json.dumps(row, ensure_ascii=False) + "\n").encode())
        self._reject_counts[reason] = self._reject_counts.get(reason, 0) + 1

    def rejects(self, num_rows: int) -> list[dict[str, Any]]:
        """The first lines that were noted."""
        return [json.loads(row) for row in islice(self._rejects.lines(), num_rows)]

    def commit(self) -> Committed:
        """Bring all that was written to the disk, for another writer to go on from."""
        extents = [file.commit() for file in self._files]
        self._kept = True
        return Committed(
            bin=extents[0],
            docs=extents[1],
            rejects=extents[2],
            max_id=self._max_id,
            subsets=self._subsets(),
            reject_counts=dict(self._reject_counts),
        )

    def _subsets(self) -> dict[str, Counts]:
        return {
            name: Counts(documents=row[0], tokens=row[1], text_bytes=row[2])
            for name, row in zip(self._subset_index, self._counts.tolist(), strict=True)
        }

    def finish(self, source: Source | None, encoder: str, versions: dict[str, str]) -> Receipt:
        """Give the files their final names, the receipt last."""
        self._paths.receipt.unlink(missing_ok=True)  # of an earlier build: its bin goes now
        self._bin.publish()
        self._docs.publish(docs_header(self._documents))
        self._rejects.publish()
        if not self._reject_counts:
            self._paths.rejects.unlink()
        sync_directory(self._paths.bin.parent)
        receipt = Receipt(
            shard=self._shard,
            split=self.split,
            source=source,
            documents=self._documents,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
            max_id=self._max_id,
            subsets=self._subsets(),
            rejects=self._reject_counts,
            sha256={"bin": self._bin.sha256, "docs": sha256_of(self._paths.docs)},
            encoder=encoder,
            versions=versions,
        )
        write_receipt(self._paths.receipt, receipt)
        return receipt


# ------------------------------------------------------------------ reading a split


class TokenBins:
    """The bins of one split, in name order, open for reading.

    No file is held open between calls: a map that stays open grows by every page it has read.

    Raises:
        TokenBinError: the split is not there, a bin's size is not what its receipt says, or a
            shard asked for has no receipt.
    """

    def __init__(self, directory: Path, split: Split, shards: str = "all") -> None:
        self.directory = directory
        self.split: Split = split
        self.dataset = read_dataset(directory)
        names = built(directory, split)
        if not names:
            raise TokenBinError(f"{directory / split}: no bins there: run `make tokenize` first")
        picked = pick_shards(shards, names, directory / split)
        paths = [BinPaths(directory, split, name) for name in names if shard_key(name) in picked]
        self.receipts = tuple(read_receipt(path.receipt) for path in paths)
        self._paths = tuple(paths)
        for path, receipt in zip(paths, self.receipts, strict=True):
            expected = receipt.tokens * self.dataset.token_dtype.itemsize
            found = path.bin.stat().st_size if path.bin.exists() else 0
            if found != expected:
                raise TokenBinError(
                    f"{path.bin}: {found:,} bytes, but its receipt says {receipt.tokens:,} tokens "
                    f"of {self.dataset.dtype} ({expected:,} bytes): tokenize the shard again"
                )
            if receipt.max_id >= self.dataset.vocab_size:
                raise TokenRangeError(
                    f"{path.receipt}: max_id {receipt.max_id}, but the vocabulary has "
                    f"{self.dataset.vocab_size:,}"
                )

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each bin."""
        return tuple(receipt.tokens for receipt in self.receipts)

    def tokens(self, bin_index: int) -> NDArray[np.unsignedinteger]:
        """All tokens of one bin, mapped, not read; shape (tokens,)."""
        if not self.receipts[bin_index].tokens:  # an empty file cannot be mapped
            return np.zeros(0, self.dataset.token_dtype)
        return np.memmap(self._paths[bin_index].bin, self.dataset.token_dtype, mode="r")

    def documents(self, bin_index: int) -> NDArray[np.void]:
        """The DOCUMENT rows of one bin, mapped; shape (documents,)."""
        return np.load(self._paths[bin_index].docs, mmap_mode="r")

    def read_windows(
        self, bin_index: NDArray[np.integer], start_token: NDArray[np.integer], length: int
    ) -> NDArray[np.unsignedinteger]:
        """Copy windows of `length` tokens out of the bins; shape (windows, length)."""
        windows = np.empty((len(bin_index), length), self.dataset.token_dtype)
        for index in np.unique(bin_index):
            tokens = self.tokens(int(index))
            for row in np.flatnonzero(bin_index == index):
                start = int(start_token[row])
                windows[row] = tokens[start : start + length]
        return windows


def built(directory: Path, split: Split) -> list[str]:
    """The shards of a split that have a receipt, in name order."""
    return sorted(path.stem for path in (directory / split).glob("*.json"))


# ------------------------------------------------------------------ which shards


def shard_key(name: str) -> int | str:
    """What a shard goes by: `1` and `01` are the same number."""
    return int(name) if re.fullmatch("[0-9]+", name) else name


def pick_shards(wanted: str, names: Sequence[str], where: Path) -> list[int | str]:
    """The keys of the shards that a list asks for, each once.

    Args:
        wanted: `00-29`, `0-3`, `00,02,05-07`, names, or `all`. Numbers match by value.
        names: the shards that are there.
        where: the directory, for the message.

    Raises:
        TokenBinError: a shard is not there, or a range runs backwards.
    """
    present = {shard_key(name) for name in names}
    picked: dict[int | str, None] = {}
    for item in wanted.split(","):
        picked.update(dict.fromkeys(_pick(item.strip(), present, names, where)))
    return list(picked)


def _pick(
    item: str, present: set[int | str], names: Sequence[str], where: Path
) -> Sequence[int | str]:
    """What one item of a list stands for."""
    if item == "all":
        return list(present)
    if shard_key(item) in present:
        return [shard_key(item)]
    bounds = re.fullmatch("([0-9]+)-([0-9]+)", item)
    if not bounds:
        raise TokenBinError(f"{where}: there is no shard {item!r}; there are {_listing(names)}")
    first, last = int(bounds[1]), int(bounds[2])
    if first > last:
        raise TokenBinError(f"--shards {item}: the range runs backwards")
    missing = (number for number in range(first, last + 1) if number not in present)
    if lacking := [f"{number:0{len(bounds[1])}d}" for number in islice(missing, 5)]:
        raise TokenBinError(
            f"{where}: --shards {item} asks for {', '.join(lacking)}, which "
            f"{'is' if len(lacking) == 1 else 'are'} not there; there are {_listing(names)}"
        )
    return range(first, last + 1)


def _listing(names: Sequence[str]) -> str:
    shown = sorted(names) or ["none"]
    return ", ".join(shown if len(shown) <= 40 else [*shown[:39], f"… ({len(shown)} in all)"])
