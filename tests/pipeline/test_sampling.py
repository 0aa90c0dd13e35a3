"""A sample of the documents of many shards."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import write_shard

from pipeline.sampling import LONGEST_DOCUMENT_BYTES, draw
from pipeline.shards import find_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(3):
        texts = [f"{number} {line} é" * (line % 7) for line in range(60)]
        write_shard(folder / f"{number:02d}.jsonl.zst", texts)
    return folder


@settings(max_examples=25, deadline=None)
@given(sample_bytes=st.integers(1, 10_000), seed=st.integers(0, 5))
def test_a_sample_is_the_same_in_any_order_and_has_its_size(
    data: Path, sample_bytes: int, seed: int
) -> None:
    """Two runs would otherwise train two tokenizers."""
    shards = find_shards(data)
    sample = draw(shards, sample_bytes, seed)
    assert sample == draw(shards[::-1], sample_bytes, seed)
    everything = draw(shards, 10**9, seed)
    assert len(everything) == 180
    assert sample == everything[: len(sample)]
    size = sum(map(len, sample))
    assert size >= min(sample_bytes, sum(map(len, everything)))
    assert size - len(sample[-1]) < sample_bytes


def test_a_seed_draws_over_all_shards(data: Path) -> None:
    """The first shard alone is no sample of thirty."""
    first, second = (draw(find_shards(data), 1000, seed) for seed in (0, 1))
    assert first != second
    assert {text[:1] for text in first if text} == {b"0", b"1", b"2"}


def test_a_long_document_is_cut(tmp_path: Path) -> None:
    """One book of ten megabytes would make its own names the vocabulary."""
    write_shard(tmp_path / "00.jsonl", ["ü" * LONGEST_DOCUMENT_BYTES])
    (text,) = draw(find_shards(tmp_path), 10**9, 0)
    assert text.decode() == "ü" * (LONGEST_DOCUMENT_BYTES // 2)
