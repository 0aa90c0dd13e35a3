"""The optimizer, its parameter groups and the learning rate of every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer.config import OptimConfig

WSD_DECAY_SHARE = 0.2  # of the run, at its end (MiniCPM's schedule, arXiv 2404.06395)


def warmup_steps(config: OptimConfig, num_steps: int) -> int:
    """Steps of warm-up: as configured, but at most a tenth of the run."""
    return min(config.warmup_steps, num_steps // 10)


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate at which `step` (from 0) of `num_steps` is applied.

    Linear warm-up to the peak, then either a half cosine down to `min_lr_ratio` of it, or (wsd)
    the peak held until the last fifth of the run and a straight line down.
    """
    warmup = warmup_steps(config, num_steps)
    if step < warmup:
        return config.peak_lr * (step + 1) / (warmup + 1)
    floor = config.peak_lr * config.min_lr_ratio
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, num_steps - warmup)
        height = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    else:
        decay = max(1.0, num_steps * WSD_DECAY_SHARE)
        height = min(1.0, max(0.0, (num_steps - step) / decay))
    return floor + (config.peak_lr - floor) * height


def build_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW whose weight decay spares norms and embeddings (OLMo 2, arXiv 2501.00656, section 3).

    Parameters are taken in the model's own order; a tied output projection is an embedding.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    decayed: list[torch.Tensor] = []
    spared: list[torch.Tensor] = []
    for parameter in model.parameters():
        is_matrix = parameter.dim() >= 2 and id(parameter) not in embeddings
        (decayed if is_matrix else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.peak_lr, betas=config.betas, eps=config.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for every group from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
