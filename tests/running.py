"""Builders for the trainer's tests: bins from arrays, a tiny configuration, the trainer itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from making import END_OF_TEXT_ID, ROOT, bytes_dataset, command, environment, run_cli
from tiny import random_ids, tiny_config

from model.llama import LLaMAModel
from pipeline.tokenbin import BinWriter, create_dataset
from trainer.batches import to_batch
from trainer.config import Config
from trainer.loop import backward, wrap
from trainer.ranks import Ranks

TINY = """\
[model]
hidden_size = 32
num_attention_heads = 2
num_hidden_layers = 2
intermediate_size = 64
max_position_embeddings = 64
[data]
context = 16
[batch]
global_windows = 8
micro_windows = 2
[optim]
peak_lr = 3e-3
[train]
steps = 20
device = "cpu"
[eval]
every = 10
windows = 8
[checkpoint]
every = 10
[run]
log_every = 5
"""


def write_bins(
    directory: Path, train: dict[str, Sequence[int]], val: dict[str, Sequence[int]] | None = None
) -> Path:
    """A dataset whose bins hold these tokens (one document a bin, its end-of-text last)."""
    tokenizer = json.dumps({"made": "for a test"}).encode()
    dataset = bytes_dataset(tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest())
    create_dataset(directory, dataset, tokenizer)
    for split, bins in (("train", train), ("val", val or {})):
        for shard, ids in bins.items():
            with BinWriter(directory, split, shard, dataset) as writer:
                body = np.asarray(ids, np.int64)
                if len(body):
                    writer.append(body[:-1], np.array([len(body) - 1]), [1], [1], ["made"])
                writer.finish(None, "none", {})
    return directory


def letters(count: int, seed: int = 0) -> list[int]:
    """Tokens with something to learn in them: a noisy walk through 64 ids, ended."""
    steps = np.random.default_rng(seed).integers(1, 4, count)
    return [*(np.cumsum(steps)[:-1] % 64).tolist(), END_OF_TEXT_ID]


def write_config(path: Path, bins: Path, **sections: dict[str, Any]) -> Path:
    """The tiny configuration over these bins, with some values replaced."""
    sections = {**sections, "data": {"bins": bins.as_posix(), **sections.get("data", {})}}
    lines: list[str] = []
    for line in TINY.splitlines():
        if line.startswith("["):
            lines.append(line)
            values = sections.pop(line.strip("[]"), {})
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            replaced = set(values)
        elif line.split(" = ")[0] not in replaced:
            lines.append(line)
    path.write_text("\n".join(lines) + "\n")
    return path


def start_trainer(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """`python -m trainer …` as a process of its own, its output in pipes."""
    return subprocess.Popen(
        command("trainer", *arguments),
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def run_trainer(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same, waited for."""
    return run_cli(*arguments, module="trainer", **variables)


def rows(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The rows of one kind in a run's metrics."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


# ------------------------------------------------------------------ what a started rank imports

GRADIENT_CUTS = (1, 2, 4, 8)  # windows in a forward pass
SMALL_MODEL = tiny_config()


def some_windows() -> torch.Tensor:
    """Eight windows of 64 + 1 ids, always the same."""
    return random_ids(SMALL_MODEL, windows=8, positions=65)


def gradients_on_a_rank(directory: Path, ranks: Ranks) -> None:
    """Save the gradient and the loss of the eight windows, for each cut into micro-steps."""
    torch.manual_seed(0)
    model = LLaMAModel(SMALL_MODEL)
    forward = wrap(model, Config(), ranks)
    mine = some_windows().chunk(ranks.world_size)[ranks.rank]
    for micro in GRADIENT_CUTS:
        if len(mine) % micro:
            continue
        batches = [to_batch(part, ranks.device) for part in mine.split(micro)]
        loss = backward(forward, batches, 8 * 64, ranks, None)
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        if ranks.is_first:
            found["loss"] = torch.tensor(loss)
            torch.save(found, directory / f"{ranks.world_size}-{micro}.pt")
