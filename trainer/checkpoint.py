"""Checkpoints of a run: written whole or not at all, the newest valid one resumed.

    RUN/checkpoints/step-000500/model/config.json        the model's configuration
    RUN/checkpoints/step-000500/model/model.safetensors  its weights, fp32
    RUN/checkpoints/step-000500/optimizer.safetensors    both moments of every parameter, by name
    RUN/checkpoints/step-000500/state.json               the step, the order of the data, and the
                                                         size and sha256 of the other files

`step-000500` holds the weights after 500 updates; the step to do next is step 500. A checkpoint is
written under `partial-000500` and renamed, so what matches `step-*` was whole once. Nothing is
pickled.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file, save_file

from model import weights
from model.llama import LLaMAModel
from pipeline.tokenbin import sha256_of, sync_directory, write_whole

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, or of another run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose files are what its `state.json` says."""

    path: Path
    step: int
    order: dict[str, Any]  # what fixes the order of the data

    @property
    def model_directory(self) -> Path:
        """Where `model.weights.load` finds the model."""
        return self.path / "model"


def directory_of(run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / "checkpoints"


# ------------------------------------------------------------------ writing


def save(
    run: Path, step: int, model: LLaMAModel, optimizer: torch.optim.AdamW, order: dict[str, Any]
) -> Checkpoint:
    """Write the checkpoint of `step`; it appears under its name when it is whole and on disk."""
    final = directory_of(run) / f"step-{step:06d}"
    draft = directory_of(run) / f"partial-{step:06d}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    weights.save(model, draft / "model")
    save_file(optimizer_tensors(model, optimizer), draft / "optimizer.safetensors")
    files = {
        path.relative_to(draft).as_posix(): {"size": path.stat().st_size, "sha256": _settle(path)}
        for path in sorted(draft.rglob("*"))
        if path.is_file()
    }
    state = {"format_version": FORMAT_VERSION, "step": step, "order": order, "files": files}
    write_whole(draft / "state.json", orjson.dumps(state, option=orjson.OPT_INDENT_2))
    sync_directory(draft / "model")
    sync_directory(draft)
    shutil.rmtree(final, ignore_errors=True)  # a damaged one that was not resumed
    draft.rename(final)
    sync_directory(final.parent)
    return Checkpoint(final, step, order)


def _settle(path: Path) -> str:
    """Flush a written file to the disk and return its SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sha256_of(path)


def optimizer_tensors(model: LLaMAModel, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """The optimizer's state as `<parameter>.<moment>`, on the CPU."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment].detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def prune(run: Path, step: int, keep_last: int, keep_every: int | None) -> None:
    """Remove all but the last few checkpoints up to `step` and those at every `keep_every` steps.

    What is newer was damaged and passed over; it counts for nothing and is written anew in time.
    """
    for draft in directory_of(run).glob("partial-*"):
        shutil.rmtree(draft)
    older = [path for path in _newest_first(run) if _step_of(path) <= step]
    for path in older[keep_last:]:
        if not (keep_every and _step_of(path) % keep_every == 0):
            shutil.rmtree(path)


# ------------------------------------------------------------------ reading


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _newest_first(run: Path) -> list[Path]:
    found = [
        path for path in directory_of(run).glob("step-*") if path.name[len("step-") :].isdecimal()
    ]
    return sorted(found, key=_step_of, reverse=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose every byte has been checked.

    Raises:
        CheckpointError: a file is missing, cut or changed; it is named.
    """
    state_path = path / "state.json"
    try:
        state = orjson.loads(state_path.read_bytes())
        version, step, order = state["format_version"], state["step"], dict(state["order"])
        files = {
            name: (int(expected["size"]), str(expected["sha256"]))
            for name, expected in state["files"].items()
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{state_path}: unreadable ({error})") from None
    if step != _step_of(path):
        raise CheckpointError(f"{state_path}: says step {step}, its directory {path.name}")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{state_path}: format version {version}, but this program reads {FORMAT_VERSION}"
        )
    for name, (size, sha256) in files.items():
        file = path / name
        have = file.stat().st_size if file.is_file() else -1
        if have != size:
            found = "missing" if have < 0 else f"{have:,} bytes"
            raise CheckpointError(f"{file}: {found}, expected {size:,} bytes")
        if sha256_of(file) != sha256:
            raise CheckpointError(f"{file}: its content has changed since it was written")
    return Checkpoint(path, step, order)


def newest_valid(run: Path) -> Checkpoint | None:
    """The checkpoint to go on from, if there are any; damaged ones are named and passed over.

    Raises:
        CheckpointError: there are some and all are damaged. To begin anew would end the run.
    """
    found = next(_valid_ones(run), None)
    if found is None and (damaged := _newest_first(run)):
        raise CheckpointError(
            f"{directory_of(run)}: damaged, all of them ({', '.join(p.name for p in damaged[:5])})"
            f": bring one back, or remove them to begin anew"
        )
    return found


def _valid_ones(run: Path) -> Iterator[Checkpoint]:
    for path in _newest_first(run):
        try:
            yield open_checkpoint(path)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)


def choose(run: Path, name: str | None) -> Checkpoint:
    """The checkpoint called `step-000500` (or `step-500`), or the newest valid one.

    Raises:
        CheckpointError: there is none such.
    """
    if name is None:
        found = newest_valid(run)
        if found is None:
            raise CheckpointError(f"{directory_of(run)}: no valid checkpoint there; train first")
        return found
    for path in _newest_first(run):
        if name == path.name or name == f"step-{_step_of(path)}":
            return open_checkpoint(path)
    there = ", ".join(path.name for path in _newest_first(run)) or "none"
    raise CheckpointError(f"{directory_of(run)}: no checkpoint {name}; there is: {there}")


def load_into(checkpoint: Checkpoint, model: LLaMAModel, optimizer: torch.optim.AdamW) -> None:
    """Give model and optimizer the state they had when the checkpoint was written.

    Raises:
        CheckpointError: the checkpoint is of another model; what differs is named.
        WeightsError: its weights do not fit its own config.json.
    """
    saved = weights.load(checkpoint.model_directory)
    for field in fields(saved.config):
        then, now = getattr(saved.config, field.name), getattr(model.config, field.name)
        if then != now:
            raise CheckpointError(
                f"{checkpoint.path}: its model has {field.name} {then}, the configuration says "
                f"{now}: give the same, or another run directory"
            )
    model.load_state_dict(saved.state_dict())
    path = checkpoint.path / "optimizer.safetensors"
    tensors = load_file(path)
    parameters = dict(model.named_parameters())
    expected = {f"{name}.{moment}" for name in parameters for moment in MOMENTS}
    if tensors and tensors.keys() != expected:
        odd = sorted(tensors.keys() ^ expected)
        raise CheckpointError(f"{path}: missing or unknown tensors: {', '.join(odd[:4])}")
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if tensors:
        state["state"] = {
            index: {moment: tensors[f"{names[id(parameter)]}.{moment}"] for moment in MOMENTS}
            for index, parameter in enumerate(order)
        }
    optimizer.load_state_dict(state)
