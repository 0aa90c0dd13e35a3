"""A checkpoint is whole or it is not there, and the newest whole one is found."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_config

from model.llama import LLaMAConfig, LLaMAModel
from trainer import checkpoint as checkpoints
from trainer.checkpoint import CheckpointError, choose, load_into, newest_valid, prune, save
from trainer.config import OptimConfig
from trainer.optim import build_optimizer

SMALL = tiny_config()


def a_model(config: LLaMAConfig = SMALL, steps: int = 2) -> tuple[LLaMAModel, torch.optim.AdamW]:
    """A model that has learned a little, and its optimizer."""
    torch.manual_seed(steps)
    model = LLaMAModel(config)
    optimizer = build_optimizer(model, OptimConfig())
    for _ in range(steps):
        ids = torch.randint(config.vocab_size, (2, 9))
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, tied: bool) -> None:
    """Weights, both moments and the update count, bit for bit."""
    config = replace(SMALL, tie_word_embeddings=tied)
    model, optimizer = a_model(config, steps=3)
    save(tmp_path, 3, model, optimizer, {"context": 8})
    fresh, its_optimizer = a_model(config, steps=1)
    found = newest_valid(tmp_path)
    assert found is not None
    assert (found.step, found.order) == (3, {"context": 8})
    load_into(found, fresh, its_optimizer)
    for (name, one), two in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two), name
        for moment in checkpoints.MOMENTS:
            saved, loaded = optimizer.state[one][moment], its_optimizer.state[two][moment]
            assert torch.equal(saved, loaded), (name, moment)


def test_an_untrained_model_can_be_saved_and_resumed(tmp_path: Path) -> None:
    """Its optimizer has no moments yet."""
    model, optimizer = a_model(steps=0)
    save(tmp_path, 0, model, optimizer, {})
    fresh, its_optimizer = a_model(steps=0)
    load_into(choose(tmp_path, "step-0"), fresh, its_optimizer)
    assert not its_optimizer.state


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that was full left half a file: the one before it must be used, and said."""
    model, optimizer = a_model()
    save(tmp_path, 10, model, optimizer, {})
    newest = save(tmp_path, 20, model, optimizer, {})
    file = newest.path / name
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) * 6 // 10])
    else:
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 10
    assert str(file) in caplog.text


def test_what_was_not_finished_is_never_found(tmp_path: Path) -> None:
    """A partial directory must not look like a checkpoint, and goes away at the next prune."""
    model, optimizer = a_model()
    whole = save(tmp_path, 10, model, optimizer, {})
    partial = whole.path.with_name("partial-000020")
    partial.mkdir()
    (partial / "state.json").write_bytes(b"{")
    assert newest_valid(tmp_path) == whole
    assert not list(whole.path.parent.glob("step-000020"))
    prune(tmp_path, 10, keep_last=1, keep_every=None)
    assert not partial.exists()


def test_a_checkpoint_of_the_same_step_is_written_anew(tmp_path: Path) -> None:
    """A damaged one that was passed over stands where the new one must go."""
    model, optimizer = a_model()
    first = save(tmp_path, 10, model, optimizer, {})
    (first.path / "optimizer.safetensors").write_bytes(b"half")
    save(tmp_path, 10, model, optimizer, {})
    assert newest_valid(tmp_path) == first


def test_the_last_few_and_every_nth_are_kept(tmp_path: Path) -> None:
    """Neither a full disk nor a lost milestone."""
    model, optimizer = a_model(steps=0)
    for step in range(10, 70, 10):
        save(tmp_path, step, model, optimizer, {})
    prune(tmp_path, 60, keep_last=2, keep_every=20)
    kept = sorted(path.name for path in checkpoints.directory_of(tmp_path).iterdir())
    assert kept == ["step-000020", "step-000040", "step-000050", "step-000060"]


def test_another_model_is_refused_with_the_field(tmp_path: Path) -> None:
    """A shape error inside a tensor copy tells nobody which setting was changed."""
    save(tmp_path, 1, *a_model(), {})
    model, optimizer = a_model(replace(SMALL, intermediate_size=32), steps=0)
    with pytest.raises(CheckpointError, match="intermediate_size 48, the configuration says 32"):
        load_into(choose(tmp_path, None), model, optimizer)


def test_a_missing_checkpoint_is_said_with_what_there_is(tmp_path: Path) -> None:
    """For `--checkpoint step-7`."""
    with pytest.raises(CheckpointError, match="train first"):
        choose(tmp_path, None)
    save(tmp_path, 5, *a_model(), {})
    with pytest.raises(CheckpointError, match="there is: step-000005"):
        choose(tmp_path, "step-7")
    assert choose(tmp_path, "step-5").step == choose(tmp_path, "step-000005").step == 5


def test_a_damaged_checkpoint_never_pushes_out_a_good_one(tmp_path: Path) -> None:
    """It has the higher number, and would count as the newest for ever."""
    for step in (10, 20, 30):
        save(tmp_path, step, *a_model(steps=0), {})
    for step in (20, 30):
        (checkpoints.directory_of(tmp_path) / f"step-{step:06d}" / "state.json").write_bytes(b"{")
    again = save(tmp_path, 11, *a_model(steps=0), {})
    prune(tmp_path, 11, keep_last=1, keep_every=None)
    assert newest_valid(tmp_path) == again


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    """It would cut its metrics to nothing and go for days before anybody looks."""
    whole = save(tmp_path, 10, *a_model(steps=0), {})
    (whole.path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"all of them.*step-000010.*begin anew"):
        newest_valid(tmp_path)


@pytest.mark.parametrize(
    "change", [{"files": 3}, {"order": 3}, {"step": "x"}, {"step": 4}, {"files": {"a": {}}}]
)
def test_a_state_that_was_edited_is_damage(tmp_path: Path, change: dict[str, object]) -> None:
    """Its step says which windows come next: a wrong one trains on the wrong data."""
    whole = save(tmp_path, 6, *a_model(steps=0), {})
    state = json.loads((whole.path / "state.json").read_text())
    (whole.path / "state.json").write_text(json.dumps(state | change))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoints.open_checkpoint(whole.path)
