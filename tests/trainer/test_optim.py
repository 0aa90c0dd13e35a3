"""The learning rate of every step, and which weights decay."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from model.llama import LLaMAModel
from trainer.config import OptimConfig
from trainer.optim import build_optimizer, learning_rate, warmup_steps

SMALL = tiny_config(num_hidden_layers=1)


@given(
    steps=st.integers(1, 3000),
    warmup=st.integers(0, 1000),
    ratio=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "wsd"]),
)
def test_the_rate_stays_within_bounds_and_moves_in_small_steps(
    steps: int, warmup: int, ratio: float, schedule: str
) -> None:
    """A jump in the schedule looks like a spike in the loss, and has no cause in the data."""
    config = replace(
        OptimConfig(), warmup_steps=warmup, min_lr_ratio=ratio, schedule=schedule, peak_lr=1.0
    )
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    lower = min(ratio, 1 / (warmup_steps(config, steps) + 1))
    assert min(rates) >= lower - 1e-9
    assert max(rates) <= 1.0
    largest = max(1 / (warmup_steps(config, steps) + 1), math.pi / max(1, 0.9 * steps), 5 / steps)
    assert all(abs(b - a) <= largest + 1e-9 for a, b in pairwise(rates))


def test_a_short_run_warms_up_for_a_tenth_of_its_steps() -> None:
    """500 steps of warm-up would be all of a run of 300."""
    config = OptimConfig(warmup_steps=500)
    assert warmup_steps(config, 300) == 30
    assert learning_rate(config, 30, 300) == pytest.approx(config.peak_lr)
    assert learning_rate(config, 299, 300) == pytest.approx(0.1 * config.peak_lr, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_do_not_decay(tied: bool) -> None:
    """Decay on a norm's gain shrinks it for ever, and the loss only drifts."""
    model = LLaMAModel(replace(SMALL, tie_word_embeddings=tied))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, OptimConfig()).param_groups
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in groups)
    assert groups[0]["weight_decay"] == 0.1
    assert groups[1]["weight_decay"] == 0.0
    assert all("norm" in name or "embed" in name for name in spared)
    assert not any("norm" in name or "embed" in name for name in decayed)
    assert len(decayed) + len(spared) == len(names)
    assert any("lm_head" in name for name in decayed) is not tied
