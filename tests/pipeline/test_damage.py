"""Damage: a shard with flipped, lost or strange bytes gives the exact right bin, or an error.

What is right is found by other means than the pipeline's: the frames decompressed one by one, the
lines parsed one by one. Where a frame has no checksum, as in the sample and in The Pile, damage can
decompress to another text; then the bin is that text's, and the hash of its source tells.
"""

from __future__ import annotations

import random
from collections import Counter
from hashlib import sha256
from pathlib import Path

import orjson
import pytest
import zstandard
from making import SAMPLE, bytes_dataset, frame, write_bytes_tokenizer

from pipeline.bpe import load
from pipeline.build import Job, build
from pipeline.encoders import Encoder, choose_encoder
from pipeline.shards import Shard, ShardError
from pipeline.tokenbin import TokenBins, create_dataset
from pipeline.verify import source_faults

SHARDS = [SAMPLE / f"{name}.jsonl.zst" for name in ("06", "07", "13", "17", "27", "29", "val")]
TOKENIZER = b"{}"  # its bytes are not looked at here


def decompress(content: bytes) -> bytes:
    """What all frames of a file hold.

    Raises:
        ZstdError: they hold nothing that can be relied on.
    """
    if not content:
        raise zstandard.ZstdError("an empty file")
    found: list[bytes] = []
    while content:
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        found.append(decompressor.decompress(content))
        if not decompressor.eof:
            raise zstandard.ZstdError("cut off")
        content = decompressor.unused_data
    return b"".join(found)


def texts_of(content: bytes) -> tuple[list[str], int]:
    """The documents of a decompressed shard, and how many lines are none."""
    texts: list[str] = []
    num_rejects = 0
    for row in content.split(b"\n"):
        if not row.strip(b" \t\r"):
            continue
        try:
            record = orjson.loads(row)
        except orjson.JSONDecodeError:
            record = None
        text = record.get("text") if isinstance(record, dict) else None
        if isinstance(text, str):
            texts.append(text)
        else:
            num_rejects += 1
    return texts, num_rejects


def whole(chance: random.Random) -> bytes:
    """A shard as it is, with a checksum, or in several frames with and without."""
    content = chance.choice(SHARDS).read_bytes()
    kind = chance.choice(["as it is", "as it is", "checksum", "frames"])
    if kind == "as it is":
        return content
    text = decompress(content)
    if kind == "checksum":
        return frame(text)
    rows = text.splitlines(keepends=True)
    return frame(b"".join(rows[: len(rows) // 2])) + content + frame(b"".join(rows[-2:]))


def damage(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """One accident, and what it was."""
    kind = chance.choice(["flip", "flip", "flips", "cut", "lose", "insert", "splice", "repeat"])
    place = chance.randrange(len(content))
    length = chance.choice([1, 2, 16, 512, chance.randrange(1, len(content))])
    end = min(place + length, len(content))
    match kind:
        case "flip" | "flips":
            damaged = bytearray(content)
            for _ in range(1 if kind == "flip" else chance.randint(2, 9)):
                damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            content = bytes(damaged)
        case "cut":
            content = content[:place]
        case "lose":
            content = content[:place] + content[end:]
        case "insert":
            content = content[:place] + chance.randbytes(length) + content[place:]
        case "splice":
            other = chance.choice(SHARDS).read_bytes()
            content = content[:place] + other[place:end] + content[end:]
        case _:
            content = content[:end] + content[place:]
    return content, f"{kind} of {length} at {place}"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return choose_encoder(
        load(write_bytes_tokenizer(tmp_path_factory.mktemp("t") / "tokenizer.json"))
    )


def right_bin(content: bytes, max_reject_share: float) -> list[int] | None:
    """The tokens of a shard's file, or None if it has to be refused."""
    try:
        texts, num_rejects = texts_of(decompress(content))
    except zstandard.ZstdError:
        return None
    if num_rejects > max_reject_share * (len(texts) + num_rejects):
        return None
    return [token for text in texts for token in (*text.encode(), 256)]


def failure(job: Job, encoder: Encoder) -> ShardError | None:
    try:
        build(job, encoder, lambda _: None)
    except ShardError as error:
        return error
    return None


def outcome(folder: Path, encoder: Encoder, seed: int) -> str:
    """Damage a shard, build it, and see that it is as it must be."""
    chance = random.Random(seed)
    original = whole(chance)
    damaged, accident = damage(original, chance)
    told = f"seed {seed}: {accident} in {len(original)} bytes"
    for name, content in (("data", damaged), ("kept", original)):
        (folder / name).mkdir(parents=True)
        (folder / name / "07.jsonl.zst").write_bytes(content)
    bins, dataset = folder / "bins", bytes_dataset(tokenizer_sha256=sha256(TOKENIZER).hexdigest())
    create_dataset(bins, dataset, TOKENIZER)
    shard = Shard("07", folder / "data" / "07.jsonl.zst")
    job = Job(shard=shard, split="train", directory=bins, dataset=dataset)
    expected = right_bin(damaged, dataset.max_reject_share)
    error = failure(job, encoder)
    if error is not None:
        assert expected is None, (told, error)
        assert str(shard.path) in str(error)
        assert "\n" not in str(error)
        assert list((bins / "train").iterdir()) == [], told
        return "refused"
    assert expected is not None, told
    assert TokenBins(bins, "train").tokens(0).tolist() == expected, told
    assert list(source_faults(bins, folder / "data")) == [], told
    known = bool(list(source_faults(bins, folder / "kept")))
    assert known == (damaged != original), told
    return "right" if expected == right_bin(original, 1.0) else "of another text, and known"


def run(seeds: range, folder: Path, encoder: Encoder) -> None:
    found = Counter(outcome(folder / str(seed), encoder, seed) for seed in seeds)
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {dict(found)}")  # noqa: T201
    assert found["refused"] > len(seeds) // 2
    assert found["right"] + found["of another text, and known"] > 0


def test_damaged_shards_are_built_right_or_refused(tmp_path: Path, encoder: Encoder) -> None:
    """Bad cables, bad disks and bad proxies make no shorter corpus."""
    run(range(100), tmp_path, encoder)


@pytest.mark.accept
def test_many_damaged_shards_are_built_right_or_refused(tmp_path: Path, encoder: Encoder) -> None:
    """The same, oftener."""
    run(range(1000, 1500), tmp_path, encoder)
