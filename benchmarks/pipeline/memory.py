"""Whether the memory of `tokenize` stays flat over one large shard.

    python benchmarks/pipeline/memory.py --data tests/sample --gigabytes 10 --tokenizer T.json

The shard repeats the lines of DATA until it holds so many bytes, in a frame with a window of
128 MiB as The Pile's have. While it is tokenized, the resident memory of the command and all its
workers is noted against the bytes of the bin. The result is one JSON object: the peak, and the
slope of the second half in MB a GB of text. Linux only: it reads /proc.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import zstandard

from pipeline.shards import find_shards
from pipeline.tokenbin import read_receipt

SECONDS_BETWEEN_SAMPLES = 0.5


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("tests/sample"))
@click.option("--tokenizer", type=click.Path(path_type=Path), required=True)
@click.option("--gigabytes", default=10.0, show_default=True, help="Of lines.")
@click.option("--workers", default=1, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder to work in, instead of /tmp.")
def main(data: Path, tokenizer: Path, gigabytes: float, workers: int, keep: Path | None) -> None:
    """Tokenize one large shard and watch its memory."""
    with tempfile.TemporaryDirectory(dir=keep) as name:
        folder = Path(name)
        write_shard(folder / "data" / "00.jsonl.zst", data, int(gigabytes * 1e9))
        began = time.monotonic()
        samples = np.array(list(watch(folder, tokenizer, workers)), float)
        seconds = time.monotonic() - began
        receipt = read_receipt(folder / "bins" / "train" / "00.json")
    written, resident = samples[:, 0] / max(samples[-1, 0], 1), samples[:, 1]
    later = written >= 0.5
    slope = np.polyfit(written[later] * receipt.text_bytes / 1e9, resident[later] / 1e6, 1)[0]
    facts = {
        "text_gb": round(receipt.text_bytes / 1e9, 3),
        "documents": receipt.documents,
        "tokens": receipt.tokens,
        "encoder": receipt.encoder,
        "workers": workers,
        "seconds": round(seconds, 1),
        "mb_a_second": round(receipt.text_bytes / 1e6 / seconds, 1),
        "samples": len(samples),
        "mb_at_tenths": [
            round(float(resident[np.searchsorted(written, tenth / 10)]) / 1e6)
            for tenth in range(1, 11)
        ],
        "peak_mb": round(resident.max() / 1e6, 1),
        "slope_mb_a_gb": round(float(slope), 3),
    }
    click.echo(json.dumps(facts))


def write_shard(path: Path, data: Path, num_bytes: int) -> None:
    """One shard of at least so many bytes: the lines of DATA, again and again."""
    content = bytearray()
    for shard in find_shards(data):
        with zstandard.open(shard.path, "rb") as file:
            content += file.read().removesuffix(b"\n") + b"\n"
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, enable_ldm=True)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        compressor = zstandard.ZstdCompressor(compression_params=window).stream_writer(file)
        for _ in range(-(-num_bytes // len(content))):
            compressor.write(content)
        compressor.flush(zstandard.FLUSH_FRAME)


def watch(folder: Path, tokenizer: Path, workers: int) -> Iterator[tuple[int, int]]:
    """Bytes of the bin and of resident memory, now and then until the command ends."""
    places = ["--data", folder / "data", "--tokenizer", tokenizer, "--out", folder / "bins"]
    options = ["--holdout", 0, "--workers", workers]
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "tokenize", *map(str, [*places, *options])],
        stdout=subprocess.DEVNULL,
    )
    unfinished = folder / "bins" / "train" / "00.bin.partial"
    while process.poll() is None:
        if unfinished.exists():
            yield unfinished.stat().st_size, sum(map(resident_bytes, family(process.pid)))
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    if process.returncode:
        sys.exit(process.returncode)


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    rows = dict(row.split(":", 1) for row in status.splitlines())
    return int(rows["VmRSS"].split()[0]) * 1024 if "VmRSS" in rows else 0


if __name__ == "__main__":
    main()
