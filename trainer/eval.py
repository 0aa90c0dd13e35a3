"""Validation: the loss on fixed windows, and the entropy that it should end below."""

from __future__ import annotations

import numpy as np
import torch

from model.llama import LLaMAModel
from pipeline.tokenbin import TokenBins
from trainer.batches import read_windows, to_batch
from trainer.ranks import Ranks
from trainer.windows import Windows

BLOCK = 1 << 24  # tokens counted at a time


@torch.no_grad()
def validation_loss(
    model: LLaMAModel, bins: TokenBins, windows: Windows, context: int, micro: int, ranks: Ranks
) -> float:
    """Mean loss over all targets of `windows`, nats a token; each rank does its share.

    The shares may differ by a window: the sums are combined, so the number of ranks does not
    change the result.
    """
    mine = Windows(
        windows.bin_index[ranks.rank :: ranks.world_size],
        windows.start_token[ranks.rank :: ranks.world_size],
    )
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for start in range(0, len(mine.bin_index), micro):
        part = Windows(
            mine.bin_index[start : start + micro], mine.start_token[start : start + micro]
        )
        host = read_windows(bins, part, context, model.config.vocab_size, ranks.device)
        batch = to_batch(host, ranks.device)
        loss = float(model(batch.inputs, batch.targets))
        total += torch.tensor([loss * batch.num_targets, batch.num_targets], dtype=torch.float64)
    model.train()
    loss_sum, num_targets = ranks.sum(total).tolist()
    return loss_sum / num_targets


def unigram_entropy(bins: TokenBins) -> float:
    """Entropy of the token frequencies of a split, nats a token.

    It is the loss of a model that knows how frequent each token is, and nothing else.
    """
    counts = np.zeros(bins.dataset.vocab_size, np.int64)
    for index in range(len(bins.receipts)):
        tokens = bins.tokens(index)
        for start in range(0, len(tokens), BLOCK):
            counts += np.bincount(tokens[start : start + BLOCK], minlength=len(counts))
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
