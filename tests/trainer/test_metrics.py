"""The rows of a run are cut back to where it goes on, and its numbers mean what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.llama import LLaMAConfig, LLaMAModel
from trainer.metrics import MetricsLog, curve, cut_back, flops_per_token, read_rows


def a_log(path: Path, num_steps: int) -> list[dict[str, object]]:
    """A run of `num_steps` that evaluates at every third."""
    log = MetricsLog(path)
    for step in range(num_steps):
        if step % 3 == 0:
            log.write({"kind": "eval", "step": step, "val_loss": 5.0})
        log.write({"kind": "step", "step": step, "loss": 6.0 - step / 100})
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("step", [0, 1, 3, 8, 9, 20])
def test_rows_past_the_resumed_step_are_cut_off(tmp_path: Path, step: int) -> None:
    """Otherwise a resumed run has two rows for one step, and curves that run backwards."""
    path = tmp_path / "metrics.jsonl"
    before = a_log(path, 10)
    cut_back(path, step)
    expected = [row for row in before if (row["step"], row["kind"] == "step") < (step, True)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == expected


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    """A kill in the middle of a write must not make the file unreadable."""
    path = tmp_path / "metrics.jsonl"
    whole = a_log(path, 4)
    with path.open("ab") as file:
        file.write(b'{"kind":"step","st')
    cut_back(path, 9)
    assert [json.loads(line) for line in path.read_text().splitlines()] == whole


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    """NaN is no JSON: a strict reader would refuse the whole file."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"kind": "step", "step": 0, "loss": float("nan")})
    log.close()
    assert read_rows(path, "step") == [{"kind": "step", "step": 0, "loss": None}]


def test_flops_count_the_matrices_and_the_attention() -> None:
    """MFU compares runs only if its formula is the published one."""
    config = LLaMAConfig(
        vocab_size=100,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    counted = sum(parameter.numel() for parameter in LLaMAModel(config).parameters())
    expected = 6 * (counted - 100 * 32) + 12 * 2 * 32 * 16
    assert flops_per_token(config, 16) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500))
def test_a_curve_fits_its_line(values: list[float]) -> None:
    """It is shown in a terminal."""
    assert 1 <= len(curve(values)) <= 60


def test_a_falling_loss_falls_in_the_curve() -> None:
    """The picture must not be upside down."""
    assert curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
