"""A run is what its configuration says: in one go, resumed, cut into micro-steps, on more ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from running import (
    GRADIENT_CUTS,
    SMALL_MODEL,
    gradients_on_a_rank,
    letters,
    rows,
    some_windows,
    write_bins,
    write_config,
)

from model.llama import LLaMAModel
from pipeline.tokenbin import TokenBinError, TokenRangeError
from trainer.batches import Batch
from trainer.checkpoint import CheckpointError
from trainer.config import Config, ConfigError, load_config
from trainer.loop import backward, make_plan, train
from trainer.optim import build_optimizer
from trainer.ranks import Ranks, launch
from trainer.run import RunDirectory, RunError
from trainer.windows import WindowError

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
NUMBERS = ("step", "loss", "grad_norm", "lr", "position")


@pytest.fixture(scope="module")
def bins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two train bins with 248 windows of 17 tokens, and a validation bin."""
    directory = tmp_path_factory.mktemp("data") / "bins"
    return write_bins(
        directory, {"00": letters(3000), "01": letters(1000, seed=1)}, {"val": letters(200, seed=2)}
    )


@pytest.fixture
def configure(tmp_path: Path, bins: Path) -> Callable[..., Config]:
    """The tiny configuration with some values replaced, its run in tmp_path."""

    def configured(run: str = "run", **sections: dict[str, object]) -> Config:
        path = write_config(tmp_path / "config.toml", bins, **sections)
        return load_config(path, [f"run.directory={(tmp_path / run).as_posix()}"])

    return configured


def numbers(run: Path) -> list[tuple[object, ...]]:
    """What must not depend on whether a run was interrupted."""
    return [tuple(row[name] for name in NUMBERS) for row in rows(run)]


def test_a_run_learns_and_leaves_what_it_promises(
    configure: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row a step, evaluations between them, checkpoints, and the configuration to go on."""
    config = configure(train={"steps": 60}, checkpoint={"every": 25, "keep_last": 2})
    train(config, ALONE)
    run = tmp_path / "run"
    steps = rows(run)
    assert [row["step"] for row in steps] == list(range(60))
    assert [row["position"] for row in steps] == [8 * step for step in range(60)]
    assert steps[0]["loss"] == pytest.approx(np.log(257), abs=0.3)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    evals = rows(run, "eval")
    assert [row["step"] for row in evals] == [0, 10, 20, 30, 40, 50, 60]
    assert evals[-1]["val_loss"] < evals[0]["val_loss"] - 1
    assert rows(run, "event")[-1]["unigram_entropy"] == pytest.approx(np.log(64), abs=0.2)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-000050", "step-000060"]
    assert load_config(run / "config.toml") == config


def test_a_resumed_run_has_the_numbers_of_one_that_never_stopped(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    """Windows, losses and rates, bit for bit, from any checkpoint (case H16)."""
    config = configure(checkpoint={"every": 7, "keep_last": 9})
    train(config, ALONE)
    run = tmp_path / "run"
    straight = numbers(run)
    evals = rows(run, "eval")
    for lost in ("step-000020", "step-000014"):  # as if killed after step 14, then after step 7
        shutil.rmtree(run / "checkpoints" / lost)
        train(config, ALONE)
        assert numbers(run) == straight
        assert rows(run, "eval") == evals
    assert len({row[4] for row in straight}) == 20


def test_a_finished_run_says_so_and_changes_nothing(
    configure: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Started again by a script, it must neither fail nor train on."""
    config = configure(train={"steps": 3})
    train(config, ALONE)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with caplog.at_level("INFO"):
        train(config, ALONE)
    assert "finished, 3 of 3 steps" in caplog.text
    assert len(rows(tmp_path / "run")) == 3
    assert before.startswith((tmp_path / "run" / "metrics.jsonl").read_bytes()[:100])


def test_two_processes_do_not_train_one_run(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    """Their rows and checkpoints would be mixed."""
    config = configure(train={"steps": 2})
    (tmp_path / "run").mkdir()
    holder = RunDirectory(config, {}, ALONE)
    model = LLaMAModel(make_plan(config, 1, None).llama)
    holder.resume(model, build_optimizer(model, config.optim))
    with pytest.raises(RunError, match="another process is training"):
        train(config, ALONE)
    holder.close()
    train(config, ALONE)


def test_more_steps_may_be_asked_for_on_resume_and_are_recorded(
    configure: Callable[..., Config], tmp_path: Path
) -> None:
    """Changing the length or the rate of a run is the user's right."""
    train(configure(train={"steps": 10}), ALONE)
    train(configure(train={"steps": 12}, optim={"peak_lr": 1e-3}), ALONE)
    resumed = rows(tmp_path / "run", "event")[-2]
    assert resumed["event"] == "resume"
    assert resumed["changes"] == {"train.steps": [10, 12], "optim.peak_lr": [3e-3, 1e-3]}
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(12))


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("batch", {"global_windows": 4}, "global_windows 8, now it is 4"),
        ("data", {"seed": 9}, "seed 0, now it is 9"),
        ("data", {"shards": "00"}, "bins"),
    ],
)
def test_another_order_of_the_data_is_refused_on_resume(
    configure: Callable[..., Config], section: str, values: dict[str, object], words: str
) -> None:
    """Half of the data would be read twice, the other half never."""
    train(configure(train={"steps": 2}), ALONE)
    changed = configure(**{"train": {"steps": 4}, section: values})
    with pytest.raises(RunError, match=words):
        train(changed, ALONE)
    train(changed, ALONE, resume_anyway=True)


def test_another_model_is_refused_on_resume(configure: Callable[..., Config]) -> None:
    """With the setting that was changed."""
    train(configure(train={"steps": 2}), ALONE)
    with pytest.raises(CheckpointError, match="hidden_size 32, the configuration says 48"):
        train(configure(train={"steps": 4}, model={"hidden_size": 48}), ALONE)


def test_a_model_with_too_few_rows_is_refused_with_both_numbers(
    configure: Callable[..., Config],
) -> None:
    """Before anything is allocated, never as a device-side assert (case H26)."""
    with pytest.raises(ConfigError, match=r"256.*257"):
        make_plan(configure(model={"vocab_size": 256}), 1, None)
    assert make_plan(configure(model={"vocab_size": 257}), 1, None).llama.vocab_size == 257
    assert make_plan(configure(model={"vocab_size": 320}), 1, None).llama.vocab_size == 320
    assert make_plan(configure(), 1, None).llama.vocab_size == 257


@pytest.mark.parametrize(("windows", "ranks"), [(40, 3), (2, 4)])
def test_windows_that_do_not_divide_are_refused_with_both_numbers(
    configure: Callable[..., Config], windows: int, ranks: int
) -> None:
    """A rounded number of micro-steps is another batch than the one asked for (case H19)."""
    config = configure(batch={"global_windows": windows, "micro_windows": 1})
    with pytest.raises(ConfigError, match=f"{windows}.*{ranks} ranks"):
        make_plan(config, ranks, None)


def test_windows_that_divide_are_shared(configure: Callable[..., Config]) -> None:
    """40 windows on 4 ranks are 10 forward passes each (case H19)."""
    config = configure(batch={"global_windows": 40, "micro_windows": 1})
    assert make_plan(config, 4, None).num_micro_steps == 10


@pytest.mark.parametrize("count", [0, 1, 16])
def test_a_split_without_a_window_is_refused(tmp_path: Path, count: int) -> None:
    """With the split, its length and what a window needs (case H15)."""
    short = write_bins(tmp_path / "short", {"00": letters(count) if count else []})
    config = load_config(write_config(tmp_path / "c.toml", short))
    with pytest.raises(WindowError, match=rf"train split has {count} tokens.* 17 "):
        make_plan(config, 1, None)
    uneven = write_bins(tmp_path / "uneven", {"00": letters(999)}, {"val": letters(max(count, 1))})
    with pytest.raises(WindowError, match=r"val split"):
        make_plan(load_config(write_config(tmp_path / "c.toml", uneven)), 1, None)


def test_an_empty_validation_split_counts_as_none(tmp_path: Path) -> None:
    """Training without validation works."""
    directory = write_bins(tmp_path / "bins", {"00": letters(999)}, {"val": []})
    config = load_config(write_config(tmp_path / "c.toml", directory))
    assert make_plan(config, 1, None).val_bins is None
    train(replace(config, run=replace(config.run, directory=str(tmp_path / "run"))), ALONE)
    assert not rows(tmp_path / "run", "eval")


def test_bins_that_are_not_there_are_named(tmp_path: Path) -> None:
    """The usual first mistake."""
    config = load_config(write_config(tmp_path / "c.toml", tmp_path / "nowhere"))
    with pytest.raises(TokenBinError, match="nowhere"):
        make_plan(config, 1, None)


def test_a_lying_receipt_stops_the_run_before_the_first_step(
    tmp_path: Path, configure: Callable[..., Config]
) -> None:
    """An id without an embedding row must never reach the model (case H26)."""
    directory = write_bins(tmp_path / "bins", {"00": letters(8 * 16 + 1)})
    tokens = np.fromfile(directory / "train" / "00.bin", np.uint16)
    tokens[70] = 300
    tokens.tofile(directory / "train" / "00.bin")
    with pytest.raises(TokenRangeError, match="token 70 has id 300"):
        train(configure(data={"bins": directory.as_posix()}), ALONE)
    assert not rows(tmp_path / "run")


# ------------------------------------------------------------------ accumulation (case H20)


def test_the_gradient_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    """8 windows as 8x1, 4x2, 2x4 and 1x8, on one rank and on two, are one batch."""
    results: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    gradients_on_a_rank(tmp_path, ALONE)
    launch(partial(gradients_on_a_rank, tmp_path), 2, "cpu", 60)
    for ranks in (1, 2):
        for micro in GRADIENT_CUTS:
            if (8 // ranks) % micro == 0:
                results[ranks, micro] = torch.load(tmp_path / f"{ranks}-{micro}.pt")
    assert len(results) == 7
    whole = results[1, 8]
    for cut, found in results.items():
        for name, expected in whole.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7, msg=str(cut))


@pytest.mark.parametrize("num_masked", [1, 63])
def test_masked_targets_do_not_change_what_a_token_weighs(num_masked: int) -> None:
    """A mean of means would give the only token of a masked window the weight of all others."""
    torch.manual_seed(0)
    model = LLaMAModel(SMALL_MODEL)
    ids = some_windows()
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets.view(-1)[:num_masked] = -100
    count = int((targets != -100).sum())
    expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    expected.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    batches = [
        Batch(x, y, int((y != -100).sum()))
        for x, y in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    loss = backward(model, batches, targets.numel(), ALONE, None)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert count < targets.numel()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-7)
