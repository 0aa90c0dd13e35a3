"""What tests are made of: shards, a tokenizer whose token counts are known beforehand, commands.

The tokenizer has no merges: the id of byte b is b and end-of-text is 256, so a document costs as
many tokens as its text has bytes, and one more.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.tokenbin import Dataset

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "sample"
SHARED = ROOT.parent / "shared"  # handed material, for tests marked `accept`
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 256


def line(text: object, subset: str | None = None) -> bytes:
    """A shard's line with its newline, non-ASCII characters written as themselves."""
    record: dict[str, object] = {"text": text}
    if subset is not None:
        record["meta"] = {"pile_set_name": subset}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def frame(content: bytes) -> bytes:
    """A zstd frame with a checksum and without its content's size, as The Pile's are."""
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    return compressor.compress(content) + compressor.flush()


def skippable_frame(content: bytes) -> bytes:
    """A frame that a decompressor has to pass over."""
    return struct.pack("<II", 0x184D2A50, len(content)) + content


def write_shard(path: Path, texts: Iterable[object], subset: str | None = None) -> Path:
    """A shard of these documents: compressed if its name ends in .zst."""
    content = b"".join(line(text, subset) for text in texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(frame(content) if path.suffix == ".zst" else content)
    return path


def byte_symbols() -> list[str]:
    """The character that spells each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_bytes_tokenizer(
    path: Path, size: int = 257, swap: Mapping[int, int] | None = None, **top_level: object
) -> Path:
    """A tokenizer.json without merges.

    Args:
        path: where to.
        size: entries; those above 257 are never used.
        swap: bytes that change places with the entry of another id.
        top_level: replaces fields of the file.
    """
    tokens = [*byte_symbols(), END_OF_TEXT, *(f"<unused {n}>" for n in range(257, size))]
    for byte, other in (swap or {}).items():
        tokens[byte], tokens[other] = tokens[other], tokens[byte]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True
    special = {"id": tokens.index(END_OF_TEXT), "content": END_OF_TEXT, "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | top_level), encoding="utf-8")
    return path


def num_tokens(texts: Sequence[str]) -> int:
    """What documents cost with the bytes tokenizer."""
    return sum(len(text.encode()) + 1 for text in texts)


def bytes_dataset(vocab_size: int = 257, **changes: object) -> Dataset:
    """A `dataset.json` for bins of the bytes tokenizer."""
    fields = {
        "tokenizer_sha256": "0" * 64,
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 1 << 16 else "uint32",
        "end_of_text_token": END_OF_TEXT,
        "end_of_text_id": END_OF_TEXT_ID,
        "holdout": 0.0,
        "max_reject_share": 0.01,
        "repair": False,
    }
    return Dataset(**(fields | changes))


def flat(documents: Iterable[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids one after another and their lengths, as an encoder gives them."""
    rows = [np.array(document, np.int64) for document in documents]
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.concatenate([*rows, np.zeros(0, np.int64)]), lengths


def command(module: str, *arguments: object) -> list[str]:
    """`python -m module arguments`, for a process."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """This process's, for one that runs from the repository's root."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | changes


def run_cli(
    *arguments: object, module: str = "pipeline", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, and wait for it."""
    return subprocess.run(
        command(module, *arguments),
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def wait_for_end(group: int) -> None:
    """Until no process of a session lives (a zombie does not)."""
    deadline = time.monotonic() + 20
    while _alive_in_group(group):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of group {group} live on")
        time.sleep(0.02)


def _alive_in_group(group: int) -> bool:
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True)
    rows = (row.split() for row in found.stdout.splitlines())
    return any(int(row[0]) == group and row[1][0] not in "ZX" for row in rows)


# A process's peak counts that of the process it was forked from, which for pytest is gigabytes:
# a small one in between, started anew, has a small peak to hand on.
_IN_BETWEEN = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss * unit]))
"""


def run_measured(*arguments: object) -> tuple[float, int]:
    """Run a pipeline command that must succeed; its CPU seconds and its peak memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_BETWEEN, *command("pipeline", *arguments)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    code, cpu_s, peak_bytes = json.loads(done.stdout)
    assert code == 0
    return cpu_s, peak_bytes
