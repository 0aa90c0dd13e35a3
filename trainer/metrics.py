"""The numbers of a run: `metrics.jsonl`, the console line, and what they are derived from.

`metrics.jsonl` has one row a step, {"kind": "step", "step", "loss", …}, and rows of other kinds
between them. Steps count from 0; the row of step k tells the loss of weights that k updates have
made, and so does an evaluation at k. Numbers that are not finite are null.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import torch

from model.llama import LLaMAConfig, num_parameters

# Dense bf16 peak, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


class MetricsError(Exception):
    """`metrics.jsonl` holds something else than rows."""


class MetricsLog:
    """Appends rows to `metrics.jsonl`, each on the disk's side of the process at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        self._file.write(orjson.dumps(row) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()


def cut_back(path: Path, step: int) -> None:
    """Drop the rows that a run resumed at `step` will write again, and a torn last line."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise MetricsError(
                    f"{path}: byte {kept:,}: not JSON ({error}): mend or remove it"
                ) from None
            if row["step"] > step or (row["step"] == step and row["kind"] == "step"):
                break
            kept += len(line)
    if kept < path.stat().st_size:
        os.truncate(path, kept)


def read_rows(path: Path, kind: str) -> list[dict[str, Any]]:
    """All rows of one kind."""
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def flops_per_token(config: LLaMAConfig, context: int) -> float:
    """Training FLOPs for one token: 6N + 12·L·d·T, forward and backward.

    N leaves the input embedding out unless it is tied to the output; L layers of width d,
    T tokens of context (PaLM, arXiv 2204.02311, appendix B).
    """
    parameters = num_parameters(config)
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * context
    return 6.0 * parameters + attention


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in bf16, FLOP/s, or None if it is not a card we know."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for card, peak in PEAK_FLOPS.items() if card in name), None)


def console_line(row: dict[str, Any], num_steps: int, seconds_left: float) -> str:
    """What a person reads every `log_every` steps."""
    mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
    left = str(timedelta(seconds=round(seconds_left)))
    return (
        f"step {row['step']:>6}/{num_steps}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3f}  "
        f"lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} tok/s{mfu}  left {left}"
    )


def curve(values: list[float], width: int = 60) -> str:
    """A loss curve in one line of text: bucket means between their extremes."""
    marks = "▁▂▃▄▅▆▇█"
    size = max(1, -(-len(values) // width))
    buckets = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(bucket) / len(bucket) for bucket in buckets]
    low, high = min(means), max(means)
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join(marks[round((mean - low) * scale)] for mean in means)
