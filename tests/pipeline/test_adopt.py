"""Taking in bins that other programs wrote."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import run_cli, write_bytes_tokenizer

from pipeline import adopt as adopting
from pipeline.adopt import adopt
from pipeline.bpe import BPE, load
from pipeline.tokenbin import UNENDED, TokenBinError, TokenBins, TokenRangeError, read_dataset
from pipeline.verify import faults


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> BPE:
    return load(write_bytes_tokenizer(tmp_path_factory.mktemp("t") / "tokenizer.json"))


def bare(path: Path, tokens: list[int], dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(tokens, dtype).tofile(path)
    return path


@settings(max_examples=25, deadline=None)
@given(tokens=st.lists(st.sampled_from([97, 98, 0xC3, 256]), max_size=20), block=st.integers(1, 9))
def test_documents_are_cut_at_end_of_text(
    tmp_path_factory: pytest.TempPathFactory, bpe: BPE, tokens: list[int], block: int
) -> None:
    """Whatever the blocks in which it is read, and whether it ends with end-of-text or not."""
    folder = tmp_path_factory.mktemp("adopt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopting, "BLOCK_BYTES", 2 * block)
        receipt = adopt(folder / "bins", "train", bare(folder / "train.bin", tokens), bpe)
    ends = [place + 1 for place, token in enumerate(tokens) if token == 256]
    unended = bool(tokens) and tokens[-1] != 256
    expected = [*ends, len(tokens)] if unended else ends
    bins = TokenBins(folder / "bins", "train")
    rows = bins.documents(0)
    assert bins.tokens(0).tolist() == tokens
    assert rows["end_token"].tolist() == expected
    assert rows["line"].tolist() == list(range(1, len(expected) + 1))
    assert rows["flags"].tolist() == [0] * len(ends) + [UNENDED] * unended
    assert rows["text_bytes"].sum() == receipt.text_bytes == len(tokens) - len(ends)
    assert list(receipt.subsets) == (["unknown"] if expected else [])
    assert receipt.source is None
    assert list(faults(folder / "bins")) == []


def test_an_id_without_a_place_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """On the GPU it would be an assertion in some kernel, at some step."""
    tokenizer = write_bytes_tokenizer(tmp_path / "tokenizer.json")
    tokens = list(b"abcdefgh" * 64)
    tokens[400] = 300
    done = run_cli(
        *("verify", tmp_path / "bins", "--adopt", bare(tmp_path / "bad.bin", tokens)),
        *("--tokenizer", tokenizer),
    )
    assert done.returncode == 1
    assert "bad.bin: token 400 has id 300, but the vocabulary has 257" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path for path in (tmp_path / "bins").rglob("*") if path.is_file()] == []
    tokens[400], tokens[-1] = 97, 256
    done = run_cli(
        *("verify", tmp_path / "bins", "--adopt", bare(tmp_path / "good.bin", tokens)),
        *("--tokenizer", tokenizer, "--split", "val"),
    )
    assert done.returncode == 0, done.stderr
    assert TokenBins(tmp_path / "bins", "val", "good").receipts[0].max_id == 256


def test_the_dtype_goes_by_the_vocabulary(tmp_path: Path) -> None:
    """Four-byte ids read as two-byte ones are nonsense without an error."""
    bpe = load(write_bytes_tokenizer(tmp_path / "tokenizer.json", size=70_000))
    adopt(tmp_path / "bins", "train", bare(tmp_path / "x.bin", [97, 69_999, 256], "<u4"), bpe)
    assert read_dataset(tmp_path / "bins").dtype == "uint32"
    assert TokenBins(tmp_path / "bins", "train").tokens(0).tolist() == [97, 69_999, 256]
    with pytest.raises(TokenBinError, match=r"y\.bin: 6 bytes are no whole number of tokens of 4"):
        adopt(tmp_path / "bins", "train", bare(tmp_path / "y.bin", [1, 2, 3]), bpe)


def test_a_dataset_takes_only_bins_of_its_own_tokenizer(tmp_path: Path, bpe: BPE) -> None:
    """The same ids would be other words."""
    bins = tmp_path / "bins"
    adopt(bins, "train", bare(tmp_path / "x.bin", [97, 256]), bpe)
    with pytest.raises(TokenBinError, match=r"x\.json: there is a bin of that name"):
        adopt(bins, "train", tmp_path / "x.bin", bpe)
    other = load(write_bytes_tokenizer(tmp_path / "other.json", size=300))
    with pytest.raises(TokenBinError, match="made with tokenizer"):
        adopt(bins, "train", bare(tmp_path / "y.bin", [97, 256]), other)
    with pytest.raises(TokenBinError, match="no such file"):
        adopt(bins, "train", tmp_path / "z.bin", bpe)
    with pytest.raises(TokenRangeError):
        adopt(bins, "train", bare(tmp_path / "w.bin", [97, 257]), bpe)
    assert sorted(path.name for path in (bins / "train").iterdir()) == [
        "x.bin",
        "x.docs.npy",
        "x.json",
    ]


def test_a_bare_bin_that_lies_in_place_is_adopted_there(tmp_path: Path, bpe: BPE) -> None:
    """It may have been moved there already, and 26 GB are not copied twice by hand."""
    path = bare(tmp_path / "bins" / "train" / "00.bin", [97, 256])
    adopt(tmp_path / "bins", "train", path, bpe)
    assert list(faults(tmp_path / "bins")) == []
