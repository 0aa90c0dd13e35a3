"""What is shown while shards are built: bars on a terminal, a line now and then elsewhere.

Of each running shard and of all: documents, MB of text a second, and the time that is left, which
the share of the files' bytes read tells.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from pipeline.build import Job, Update

if TYPE_CHECKING:  # every process imports this module, and only a terminal needs the bars
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 15.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Meter:
    """How far a shard has come, or all of them."""

    source_size: int  # bytes of the files as they lie there
    documents: int = 0
    text_bytes: int = 0
    source_bytes: int = 0
    started: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        told = f"{self.documents:,} documents, {self.text_bytes / 1e6 / seconds:.1f} MB/s"
        if not 0 < self.source_bytes < self.source_size:
            return told
        left = seconds * (self.source_size - self.source_bytes) / self.source_bytes
        return f"{told}, {timedelta(seconds=round(left))} left"


class Progress:
    """Follows jobs from their start to their end; a context manager."""

    def __init__(self, jobs: list[Job]) -> None:
        self._sizes = {job.shard.name: job.shard.num_bytes for job in jobs}
        self._running: dict[str, Meter] = {}
        self._all = Meter(sum(self._sizes.values()))
        self._num_finished = 0
        self._last_line = time.monotonic()
        self._bars = _bars() if sys.stderr.isatty() else None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        if self._bars:
            self._bars.start()
            self._tasks["all"] = self._bars.add_task("all", total=self._all.source_size, told="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def begin(self, shard: str) -> None:
        self._running[shard] = Meter(self._sizes[shard])
        if self._bars:
            self._tasks[shard] = self._bars.add_task(shard, total=self._sizes[shard], told="")

    def update(self, update: Update) -> None:
        meter = self._running[update.shard]
        self._all.documents += update.documents - meter.documents
        self._all.text_bytes += update.text_bytes - meter.text_bytes
        self._all.source_bytes += update.source_bytes - meter.source_bytes
        meter.documents, meter.text_bytes = update.documents, update.text_bytes
        meter.source_bytes = update.source_bytes
        self._show(update.shard, meter)
        if not self._bars and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            for shard, running in self._running.items():
                log.info("%s: %s", shard, running)
            log.info("all: %s", self._all)

    def finish(self, shard: str) -> None:
        """A job is over, whatever it came to."""
        meter = self._running.pop(shard)
        self._all.source_bytes += meter.source_size - meter.source_bytes
        self._num_finished += 1
        self._show(shard, meter)
        if self._bars:
            self._bars.remove_task(self._tasks.pop(shard))
        log.info("%s: %s (%d of %d shards)", shard, meter, self._num_finished, len(self._sizes))

    def _show(self, shard: str, meter: Meter) -> None:
        if self._bars:
            for name, shown in ((shard, meter), ("all", self._all)):
                task = self._tasks[name]
                self._bars.update(task, completed=shown.source_bytes, told=str(shown))


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[told]}"),
        console=Console(stderr=True),
    )
