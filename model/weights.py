"""A model as a directory: `config.json` and `model.safetensors`.

config.json holds the fields of LLaMAConfig. The weights are fp32 under their plain names, whatever
wrapped the model while it was trained; tied embeddings are there once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model.llama import LLaMAConfig, LLaMAModel, ModelConfigError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"

_WRAPPERS = {"_orig_mod", "module"}  # torch.compile's and DistributedDataParallel's


class WeightsError(Exception):
    """A directory does not hold a model that can be loaded."""


def clean_name(name: str) -> str:
    """The parameter's own name, without what torch.compile and DDP put before or into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model, wrapped or not, as contiguous fp32 tensors on the CPU.

    Tensors that already are that share the model's memory: write them before the next step.
    """
    return {
        clean_name(name): weight.detach().to("cpu", torch.float32).contiguous()
        for name, weight in model.named_parameters()
    }


def save(model: LLaMAModel, directory: Path) -> None:
    """Write the model; each of the two files appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / WEIGHTS_NAME
    save_file(plain_state_dict(model), _partial(weights), metadata={"format": "pt"})
    _publish(weights)
    config = directory / CONFIG_NAME
    _partial(config).write_text(json.dumps(asdict(model.config), indent=1) + "\n", encoding="utf-8")
    _publish(config)


def load(directory: Path) -> LLaMAModel:
    """The model in `directory`, in fp32 on the CPU.

    Raises:
        WeightsError: a file is missing or damaged, or the weights are not those of the
            configuration; the first names that differ are given.
    """
    config = read_config(directory / CONFIG_NAME)
    tensors = _read_tensors(directory / WEIGHTS_NAME)
    with torch.device("meta"):
        model = LLaMAModel(config)
    _check_shapes(directory / WEIGHTS_NAME, tensors, dict(model.named_parameters()))
    # a copy, because safetensors may leave the tensors mapped to the file
    owned = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(owned, assign=True)
    return model


def read_config(path: Path) -> LLaMAConfig:
    """The configuration in a config.json.

    Raises:
        WeightsError: it is missing, damaged, or not exactly the fields of LLaMAConfig.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise WeightsError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise WeightsError(f"{path}: expected a JSON object, found {type(values).__name__}")
    names = {field.name for field in fields(LLaMAConfig)}
    if values.keys() != names:
        odd = ", ".join(sorted(values.keys() ^ names))
        raise WeightsError(f"{path}: missing or unknown fields: {odd}")
    try:
        return LLaMAConfig(**values)
    except ModelConfigError as error:
        raise WeightsError(f"{path}: {error}") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise WeightsError(f"{path}: there is no such file")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise WeightsError(f"{path}: damaged or cut off ({error}): take another copy") from None
    tensors = {clean_name(name): tensor for name, tensor in stored.items()}
    if len(tensors) < len(stored):
        raise WeightsError(f"{path}: the same weight is stored under several prefixes")
    return tensors


def _check_shapes(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for what, names in (
        ("missing", expected.keys() - found.keys()),
        ("unexpected", found.keys() - expected.keys()),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise WeightsError(f"{path}: {len(names)} weights {what}: {shown}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape or not tensor.is_floating_point():
            raise WeightsError(
                f"{path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"but {CONFIG_NAME} asks for floats of shape {tuple(expected[name].shape)}"
            )


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _publish(path: Path) -> None:
    """Give a file written under its partial name its final one, once it is on the disk."""
    with _partial(path).open("r+b") as file:
        os.fsync(file.fileno())
    _partial(path).replace(path)
