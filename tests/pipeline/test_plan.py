"""What is settled before anything is written."""

from pathlib import Path

import pytest
from making import bytes_dataset, write_bytes_tokenizer, write_shard

from pipeline.bpe import TokenizerError, load
from pipeline.build import Job
from pipeline.plan import choose_dtype, choose_validation, concerns, estimate_bytes, require_space
from pipeline.shards import Shard, ShardError
from pipeline.tokenbin import Receipt, TokenBinError


def receipt(shard: str, documents: int) -> Receipt:
    return Receipt(
        shard=shard,
        split="train",
        source=None,
        documents=documents,
        tokens=documents,
        text_bytes=0,
        max_id=0,
        subsets={},
        rejects={},
        sha256={},
        encoder="",
        versions={},
    )


def test_the_validation_file_is_found_named_or_left_out(tmp_path: Path) -> None:
    """A validation loss on the wrong file is worse than none."""
    assert choose_validation(tmp_path, "auto") is None
    other = write_shard(tmp_path / "held.jsonl", ["a"])
    assert choose_validation(tmp_path, str(other)) == Shard("val", other)
    own = write_shard(tmp_path / "val.jsonl.zst", ["a"])
    assert choose_validation(tmp_path, "auto") == Shard("val", own)
    assert choose_validation(tmp_path, "none") is None
    write_shard(tmp_path / "val.jsonl", ["a"])
    with pytest.raises(ShardError, match="both there"):
        choose_validation(tmp_path, "auto")
    for wrong in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(ShardError, match=r"expected a .jsonl.zst or .jsonl file, auto or none"):
            choose_validation(tmp_path, str(wrong))


@pytest.mark.parametrize(
    ("size", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_ids_get_as_many_bytes_as_the_largest_needs(tmp_path: Path, size: int, dtype: str) -> None:
    """One entry too many, and the last id becomes 0."""
    bpe = load(write_bytes_tokenizer(tmp_path / "tokenizer.json", size))
    assert choose_dtype(bpe, "auto") == dtype
    assert choose_dtype(bpe, "uint32") == "uint32"
    if dtype == "uint16":
        assert choose_dtype(bpe, "uint16") == "uint16"
    else:
        with pytest.raises(TokenizerError, match="largest id of the tokenizer is 65,536"):
            choose_dtype(bpe, "uint16")


def test_too_little_disk_is_found_before_the_work(tmp_path: Path) -> None:
    """A disk that fills up at night ends all the jobs on it."""
    plain = write_shard(tmp_path / "0.jsonl", ["a" * 9_988])
    packed = write_shard(tmp_path / "1.jsonl.zst", ["a"])
    sizes = []
    for path in (plain, packed):
        shard = Shard(path.stem, path)
        dataset = bytes_dataset()
        sizes.append(
            estimate_bytes([Job(shard=shard, split="train", directory=tmp_path, dataset=dataset)])
        )
    assert sizes == [6_000, int(packed.stat().st_size * 1.8)]
    assert estimate_bytes([]) == 0
    require_space(tmp_path / "not" / "there" / "yet", 1_000)
    with pytest.raises(TokenBinError, match=r"the bins need about 1,000,000,000.0 GB"):
        require_space(tmp_path / "bins", 10**18)
    assert not (tmp_path / "bins").exists()


def test_what_training_will_lack_is_said(tmp_path: Path) -> None:
    """A run without a validation loss must be somebody's choice."""
    train, val = [receipt("00", 1234), receipt("01", 0)], [receipt("val", 0)]
    file = Shard("val", tmp_path / "val.jsonl")
    told = list(concerns(train, [], None, 0.0))
    assert told[0] == "01: no documents, an empty bin"
    assert told[1:] == ["no validation file and no hold-out: training goes without validation"]
    (told_empty,) = concerns(train[:1], val, file, 0.0)
    assert told_empty.endswith("val.jsonl: no documents, so training goes without validation")
    (none_held_out,) = concerns(train, [receipt("00", 0)], None, 1e-6)
    assert "takes none of 1,234 documents" in none_held_out
    assert "--holdout 0.008," in none_held_out
    assert list(concerns(train[:1], [receipt("00", 3)], None, 0.1)) == []
