"""Windows of token bins as tensors on the device, read one step ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.tokenbin import TokenBins, TokenRangeError
from trainer.windows import WindowOrder, Windows


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward pass reads: `targets` are `inputs` one token later."""

    inputs: torch.Tensor  # int64, (windows, context), on the device
    targets: torch.Tensor  # the same; -100 where nothing is to be predicted
    num_targets: int  # targets that are not -100


def read_windows(
    bins: TokenBins, windows: Windows, context: int, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """The tokens of some windows, on the host, in the bins' own dtype; (windows, context + 1).

    Raises:
        TokenRangeError: an id has no embedding row. On a GPU the embedding would end in a
            device-side assert, far from the cause.
    """
    tokens = bins.read_windows(windows.bin_index, windows.start_token, context + 1)
    if tokens.size and int(tokens.max()) >= vocab_size:
        row, column = np.argwhere(tokens >= vocab_size)[0]
        shard = bins.receipts[windows.bin_index[row]].shard
        raise TokenRangeError(
            f"{bins.directory / bins.split / shard}.bin: token {windows.start_token[row] + column} "
            f"has id {tokens[row, column]}, but the model has {vocab_size:,} rows: "
            f"run `python -m pipeline verify {bins.directory}`"
        )
    host = torch.from_numpy(tokens)
    return host.pin_memory() if device.type == "cuda" else host


def to_batch(host: torch.Tensor, device: torch.device) -> Batch:
    """Copy windows to the device as they are and widen them there."""
    ids = host.to(device, non_blocking=True).long()
    return Batch(ids[:, :-1], ids[:, 1:], num_targets=host.shape[0] * (host.shape[1] - 1))


def step_batches(
    bins: TokenBins,
    order: WindowOrder,
    *,
    first_step: int,
    last_step: int,
    rank: int,
    world_size: int,
    micro_windows: int,
    vocab_size: int,
    device: torch.device,
) -> Iterator[list[Batch]]:
    """The batches of each step in [first_step, last_step), cut into micro-steps.

    The next step's windows are read while the caller works on this one's.
    """

    def read(step: int) -> torch.Tensor:
        windows = order.windows_for(step, rank, world_size)
        return read_windows(bins, windows, order.context, vocab_size, device)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
        upcoming = reader.submit(read, first_step)
        for step in range(first_step, last_step):
            host = upcoming.result()
            if step + 1 < last_step:
                upcoming = reader.submit(read, step + 1)
            yield [to_batch(micro, device) for micro in host.split(micro_windows)]
