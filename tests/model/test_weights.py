"""A model written and read again, and the directories that are no model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_ids, tiny_config, wide_model
from torch import Tensor, nn

from model.llama import LLaMAConfig, LLaMAModel
from model.weights import WeightsError, clean_name, load, plain_state_dict, save


def write(directory: Path, config: LLaMAConfig, tensors: dict[str, Tensor]) -> Path:
    """A model directory with any tensors in it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(asdict(config)), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
        {"hidden_size": 28, "rope_theta": 500000},
    ],
)
def test_a_model_comes_back_as_it_was(tmp_path: Path, changes: dict[str, Any]) -> None:
    """To the bit, and able to learn on."""
    model = wide_model(tiny_config(**changes))
    save(model, tmp_path / "a" / "model")
    loaded = load(tmp_path / "a" / "model")
    assert loaded.config == model.config
    ids = random_ids(model.config, windows=2, positions=30)
    assert torch.equal(loaded(ids), model(ids))
    loaded(ids, ids).backward()
    assert all(weight.grad is not None for weight in loaded.parameters())
    assert sorted(path.name for path in (tmp_path / "a" / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_weights_are_stored_once_in_fp32(tmp_path: Path) -> None:
    """Tied embeddings twice would double a small model's file and could differ."""
    model = wide_model(tiny_config(tie_word_embeddings=True))
    save(model.to(torch.bfloat16), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert torch.equal(load(tmp_path).embed_tokens.weight, model.embed_tokens.weight.float())


def test_a_loaded_model_does_not_hang_on_its_file(tmp_path: Path) -> None:
    """Old checkpoints are removed while a model read from one is still training."""
    model = wide_model(tiny_config())
    save(model, tmp_path)
    loaded = load(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    path.unlink()
    ids = random_ids(model.config, windows=1, positions=8)
    assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize(
    "prefix", ["", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."]
)
def test_names_of_wrapped_models_load(tmp_path: Path, prefix: str) -> None:
    """H23: weights of a compiled or distributed model load strictly, whatever wrapped it."""
    model = wide_model(tiny_config())
    tensors = {prefix + name: weight.detach() for name, weight in model.named_parameters()}
    loaded = load(write(tmp_path / "model", model.config, tensors))
    ids = random_ids(model.config, windows=1, positions=20)
    assert torch.equal(loaded(ids), model(ids))


def test_weights_of_wrapped_models_are_saved_under_plain_names(tmp_path: Path) -> None:
    """H23: a new checkpoint carries no prefix, also if single blocks were compiled."""
    model = wide_model(tiny_config())
    names = set(model.state_dict())
    assert set(plain_state_dict(nn.DataParallel(model))) == names
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert set(plain_state_dict(compiled)) == names
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    assert any("_orig_mod" in name for name in model.state_dict())
    save(model, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names


def test_only_wrappers_are_cleaned_from_a_name() -> None:
    """A parameter whose name merely resembles a wrapper's keeps it."""
    assert clean_name("module._orig_mod.module.layers.0._orig_mod.x") == "layers.0.x"
    assert clean_name("submodule.x") == "submodule.x"


@pytest.fixture(name="model")
def small_model() -> LLaMAModel:
    return wide_model(tiny_config())


def refusal(directory: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_do_not_fit_are_named(tmp_path: Path, model: LLaMAModel) -> None:
    """A lenient loader leaves random weights in place and says nothing."""
    good = plain_state_dict(model)
    without = {name: tensor for name, tensor in good.items() if name != "norm.weight"}
    more = {**good, "lm_head.bias": torch.zeros(97)}
    other = {**good, "norm.weight": torch.ones(31)}
    whole = {**good, "norm.weight": torch.ones(32, dtype=torch.int64)}
    twice = {**good, "module.norm.weight": torch.ones(32)}
    words = {
        "1 weights missing: norm.weight": without,
        "1 weights unexpected: lm_head.bias": more,
        "norm.weight is torch.float32 of shape (31,), but config.json asks for": other,
        "norm.weight is torch.int64": whole,
        "stored under several prefixes": twice,
    }
    for number, (expected, tensors) in enumerate(words.items()):
        directory = write(tmp_path / str(number), model.config, tensors)
        assert expected in refusal(directory)


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, model: LLaMAModel) -> None:
    """What a killed copy or a full disk leaves behind."""
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for kept in (0, 5, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:kept])
        assert "damaged or cut off" in refusal(tmp_path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 20)
    assert "damaged or cut off" in refusal(tmp_path)
    path.unlink()
    assert "model.safetensors: there is no such file" in refusal(tmp_path)


def test_a_damaged_configuration_is_refused_in_one_line(tmp_path: Path, model: LLaMAModel) -> None:
    """A default in place of a lost field would be another model."""
    save(model, tmp_path)
    path = tmp_path / "config.json"
    good = asdict(model.config)
    for content, expected in (
        ("{", "not JSON"),
        ("[]", "expected a JSON object, found list"),
        (json.dumps({**good, "head_dim": 8}), "missing or unknown fields: head_dim"),
        (
            json.dumps({key: good[key] for key in good if key != "rope_theta"}),
            "missing or unknown fields: rope_theta",
        ),
        (json.dumps({**good, "hidden_size": 33}), "hidden_size 33 cannot be divided"),
        (json.dumps({**good, "vocab_size": "97"}), "vocab_size is '97'"),
    ):
        path.write_text(content, encoding="utf-8")
        assert expected in refusal(tmp_path)
    path.write_bytes(b"\xff\xfe\xff")
    assert "not JSON" in refusal(tmp_path)
    path.unlink()
    assert "config.json: there is no such file" in refusal(tmp_path)
