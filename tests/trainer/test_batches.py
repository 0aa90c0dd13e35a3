"""Windows arrive as the tokens that are in the bins, whatever their dtype."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from running import letters, write_bins

from pipeline.tokenbin import TokenBins, TokenRangeError
from trainer.batches import read_windows, step_batches, to_batch
from trainer.windows import WindowOrder, Windows

CPU = torch.device("cpu")


def test_ids_of_sixteen_bits_keep_their_value(tmp_path: Path) -> None:
    """Through signed 16 bits 40000 would become -25536 (case H18)."""
    ids = np.array([0, 32767, 32768, 40000, 65534, 65535], np.uint16)
    batch = to_batch(torch.from_numpy(ids[None, :]), CPU)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs[0].tolist() == [0, 32767, 32768, 40000, 65534]
    assert batch.targets[0].tolist() == [32767, 32768, 40000, 65534, 65535]


def test_ids_of_thirty_two_bits_keep_their_value() -> None:
    """A vocabulary above 65,536 has them."""
    ids = np.array([[1, 70_000, 199_999]], np.uint32)
    assert to_batch(torch.from_numpy(ids), CPU).targets.tolist() == [[70_000, 199_999]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_read_the_step_between_them(tmp_path: Path, world_size: int) -> None:
    """Tokens tell their own place here, so what was read can be seen (case H14)."""
    bins = TokenBins(write_bins(tmp_path / "bins", {"00": [*range(256)] * 8 + [256]}), "train")
    order = WindowOrder(num_tokens=bins.num_tokens, context=16, global_windows=8, seed=1)
    seen: list[tuple[int, int]] = []
    for rank in range(world_size):
        steps = step_batches(
            bins, order, first_step=3, last_step=6, rank=rank, world_size=world_size,
            micro_windows=2, vocab_size=257, device=CPU,
        )  # fmt: skip
        for step, batches in enumerate(steps, 3):
            assert [len(batch.inputs) for batch in batches] == [2] * (4 // world_size)
            ids = torch.cat([batch.inputs for batch in batches])
            expected = order.windows_for(step, rank, world_size)
            assert ids[:, 0].tolist() == (expected.start_token % 256).tolist()
            seen += [(step, int(start)) for start in expected.start_token]
    assert len(set(seen)) == 24


def test_a_bin_whose_receipt_lies_is_stopped_before_the_model(tmp_path: Path) -> None:
    """The embedding would read past its table, on a GPU as a device-side assert (case H26)."""
    directory = write_bins(tmp_path / "bins", {"00": letters(512)})
    path = directory / "train" / "00.bin"
    tokens = np.fromfile(path, np.uint16)
    tokens[400] = 300
    tokens.tofile(path)
    bins = TokenBins(directory, "train")
    with pytest.raises(TokenRangeError, match=r"00\.bin: token 400 has id 300.* 257 rows"):
        read_windows(bins, Windows(np.array([0]), np.array([390])), 16, 257, CPU)


def test_a_receipt_with_too_large_an_id_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """It says itself that the bin does not fit its vocabulary."""
    directory = write_bins(tmp_path / "bins", {"00": letters(512)})
    path = directory / "train" / "00.json"
    receipt = json.loads(path.read_text())
    path.write_text(json.dumps({**receipt, "max_id": 300}))
    with pytest.raises(TokenRangeError, match="max_id 300"):
        TokenBins(directory, "train")
