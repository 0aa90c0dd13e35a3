"""The run directory: what a run leaves on the disk, and how it goes on from there.

    RUN/config.toml     the resolved configuration; `trainer train RUN/config.toml` goes on
    RUN/tokenizer.json  with dataset.json a copy of the bins': the run can speak without them
    RUN/metrics.jsonl   see trainer/metrics.py
    RUN/checkpoints/    see trainer/checkpoint.py
    RUN/.lock           held by the system while a process trains, so it never needs a hand

The first rank writes; the others only read the checkpoint it names.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from model.llama import LLaMAModel
from pipeline.tokenbin import write_whole
from trainer import checkpoint as checkpoints
from trainer.config import Config, dump_config, load_config
from trainer.metrics import MetricsLog, cut_back, read_rows
from trainer.ranks import Ranks

log = logging.getLogger(__name__)


class RunError(Exception):
    """The run in a directory is not the one that the configuration describes."""


class RunDirectory:
    """A run on disk, as one rank sees it.

    Args:
        config: the resolved configuration, `run.directory` included.
        order_facts: what the order of the data depends on, by name.
        ranks: all that take part.
        resume_anyway: go on although the order of the data has changed.
    """

    def __init__(
        self,
        config: Config,
        order_facts: dict[str, Any],
        ranks: Ranks,
        *,
        resume_anyway: bool = False,
    ) -> None:
        self.path = Path(config.run.directory)
        self.step = 0
        self._config = config
        self._order_facts = order_facts
        self._ranks = ranks
        self._resume_anyway = resume_anyway
        self._metrics: MetricsLog | None = None
        self._lock: BinaryIO | None = None

    @property
    def metrics_path(self) -> Path:
        """Where the rows are."""
        return self.path / "metrics.jsonl"

    def resume(self, model: LLaMAModel, optimizer: torch.optim.AdamW) -> int:
        """Load the newest valid checkpoint, if there is one, and return the step to do next.

        Raises:
            RunError: another process trains this run, or the order of the data differs from the
                checkpoint's.
            CheckpointError: the model does.
        """
        if self._ranks.is_first:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / ".lock")
        found = self._agreed_checkpoint()
        changes: dict[str, Any] = {}
        if found is not None:
            self._check_order(found)
            checkpoints.load_into(found, model, optimizer)
            self.step = found.step
            if self.step >= self._config.train.steps:
                return self.step  # nothing to do, and so nothing to write
        if self._ranks.is_first:
            changes = self._settle(found)
        self._ranks.wait()  # nobody trains before the directory is in order
        if found is not None:
            self.write({"kind": "event", "step": self.step, "event": "resume", "changes": changes})
            if self._ranks.is_first:
                log.info("going on from %s", found.path)
        return self.step

    def _agreed_checkpoint(self) -> checkpoints.Checkpoint | None:
        """The checkpoint that the first rank found, on every rank."""
        found = checkpoints.newest_valid(self.path) if self._ranks.is_first else None
        step = torch.tensor([found.step if found else -1 if self._ranks.is_first else 0])
        agreed = int(self._ranks.sum(step)[0])
        if agreed < 0 or found is not None:
            return found
        return checkpoints.choose(self.path, f"step-{agreed}")

    def _check_order(self, found: checkpoints.Checkpoint) -> None:
        for name, now in self._order_facts.items():
            then = found.order.get(name)
            if then != now and not self._resume_anyway:
                raise RunError(
                    f"{found.path}: trained with {name} {_short(then)}, now it is {_short(now)}: "
                    f"the order of the data would change; use another run directory, or "
                    f"--resume-anyway"
                )

    def _settle(self, found: checkpoints.Checkpoint | None) -> dict[str, Any]:
        """Bring the directory to the state of the checkpoint; return what the config changes."""
        config_path = self.path / "config.toml"
        changes: dict[str, Any] = {}
        if found is None:
            self.metrics_path.unlink(missing_ok=True)
        else:
            cut_back(self.metrics_path, found.step)
            before = asdict(load_config(config_path)) if config_path.exists() else {}
            now = asdict(self._config)
            changes = {
                f"{section}.{key}": [before[section].get(key), value]
                for section in before
                for key, value in now[section].items()
                if before[section].get(key) != value
            }
        write_whole(config_path, dump_config(self._config).encode())
        for name in ("dataset.json", "tokenizer.json"):
            write_whole(self.path / name, (Path(self._config.data.bins) / name).read_bytes())
        self._metrics = MetricsLog(self.metrics_path)
        return changes

    def write(self, row: dict[str, Any]) -> None:
        """Add a row to the metrics; only the first rank does."""
        if self._metrics is not None:
            self._metrics.write(row)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """All rows of one kind, those of before a resume included."""
        return read_rows(self.metrics_path, kind)

    def save(self, step: int, model: LLaMAModel, optimizer: torch.optim.AdamW) -> None:
        """Write a checkpoint and remove those that are no longer kept."""
        self.step = step
        if self._ranks.is_first:
            settings = self._config.checkpoint
            checkpoints.save(self.path, step, model, optimizer, self._order_facts)
            checkpoints.prune(self.path, step, settings.keep_last, settings.keep_every)

    def close(self) -> None:
        """Nothing more is written."""
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()


def _locked(path: Path) -> BinaryIO:
    """The lock file, open and ours until it is closed or this process ends, however it ends."""
    file = path.open("ab")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(
            f"{path.parent}: another process is training this run: wait for it, or name another "
            f"directory with --run"
        ) from None
    return file


def _short(fact: Any) -> str:
    text = str(fact)
    return text if len(text) <= 80 else f"{text[:77]}..."
