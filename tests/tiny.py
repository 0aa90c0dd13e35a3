"""Tiny real models for tests, and how far apart two results are."""

from __future__ import annotations

import torch

from model.llama import LLaMAConfig, LLaMAModel

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 96,
    "intermediate_size": 48,
}


def tiny_config(**changes: object) -> LLaMAConfig:
    return LLaMAConfig(**{**TINY, **changes})


def wide_model(config: LLaMAConfig, std: float = 0.4, seed: int = 0) -> LLaMAModel:
    """A model with weights drawn so wide that attention is peaked and a wrong position shows."""
    generator = torch.Generator().manual_seed(seed)
    model = LLaMAModel(config, generator)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0.0, std, generator=generator)
    return model


def random_ids(config: LLaMAConfig, windows: int, positions: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (windows, positions), generator=generator)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in units of the largest expected number."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())
