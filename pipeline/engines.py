"""Running shard jobs on this machine: as many processes as workers, one shard at a time in each.

Every worker has a pool of its own with one process in it, so that a killed process takes only its
own shard down, and which shard that was is known. A worker that loses its parent ends itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from pipeline.bpe import BPE, TokenizerError, load
from pipeline.build import Job, Update, build
from pipeline.encoders import Encoder, EncoderName, choose_encoder
from pipeline.lock import LockedError
from pipeline.progress import Progress
from pipeline.shards import ShardError
from pipeline.tokenbin import TokenBinError

SECONDS_TO_STOP = 5.0  # that a worker has to clean up after itself

# What a job can come to without a fault of ours.
FAILURES = (
    *(ShardError, TokenBinError, TokenizerError, LockedError),
    *(OSError, MemoryError, BrokenProcessPool),
)

log = logging.getLogger(__name__)


def run_local(
    jobs: list[Job], bpe: BPE, wanted: EncoderName, workers: int, progress: Progress
) -> dict[str, str]:
    """Build shards; the failures, by shard, one line each.

    One that fails does not stop the others.

    Args:
        jobs: all of one dataset; the largest shards go first, so that none is left at the end.
        bpe: of the dataset.
        wanted: the encoder.
        workers: processes, at most. A single one needs none of its own, and where there are more
            than shards, several threads encode one shard.
        progress: told how the jobs come along.
    """
    if not jobs:
        return {}
    queue = sorted(jobs, key=lambda job: job.shard.num_bytes)
    num_processes = min(workers, len(jobs))
    threads = max(1, workers // num_processes)
    if num_processes == 1:
        return _run_here(queue, choose_encoder(bpe, wanted, threads), progress)
    return _run_in_processes(queue, num_processes, (wanted, threads), progress)


def _run_here(queue: list[Job], encoder: Encoder, progress: Progress) -> dict[str, str]:
    failures: dict[str, str] = {}
    while queue:
        job = queue.pop()
        progress.begin(job.shard.name)
        try:
            build(job, encoder, progress.update)
        except FAILURES as error:
            _note(job, error, failures)
        progress.finish(job.shard.name)
    return failures


def _run_in_processes(
    queue: list[Job], num_processes: int, encoding: tuple[EncoderName, int], progress: Progress
) -> dict[str, str]:
    failures: dict[str, str] = {}
    running: dict[Future[None], tuple[_Worker, Job]] = {}
    workers = [_Worker(encoding) for _ in range(num_processes)]
    idle = list(workers)
    try:
        while queue or running:
            while queue and idle:
                worker, job = idle.pop(), queue.pop()
                progress.begin(job.shard.name)
                running[worker.start(job)] = (worker, job)
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for worker, _ in running.values():
                for told in worker.told():
                    if isinstance(told, logging.LogRecord):
                        log.handle(told)
                    else:
                        progress.update(told)
            for future in done:
                worker, job = running.pop(future)
                idle.append(worker)
                if error := future.exception():
                    if not isinstance(error, (*FAILURES, SystemExit)):
                        raise error
                    if isinstance(error, BrokenProcessPool):
                        worker.close()
                    _note(job, error, failures)
                progress.finish(job.shard.name)
    except BaseException:  # Ctrl-C most likely: leave no process behind
        _stop(workers, running)
        raise
    for worker in workers:
        worker.close()
    return failures


def _note(job: Job, error: BaseException, failures: dict[str, str]) -> None:
    """Say at once, in one line that names the shard, what a job came to."""
    match error:
        case LockedError() if job.split == "val":  # one of several runs builds it for all
            log.info("val: being built by another run (%s)", error)
            return
        case BrokenProcessPool() | SystemExit():
            told = f"{job.shard.name}: its process was killed (is memory short?): run again"
        case ShardError() | TokenBinError() | LockedError():
            told = str(error)
        case _:
            told = f"{job.shard.name}: {error or type(error).__name__}"
    log.error("%s", told)
    failures[job.shard.name] = told


# ------------------------------------------------------------------ a worker, from the parent


class _Worker:
    """A process that builds one shard at a time; if it is killed, the next job gets a new one."""

    def __init__(self, encoding: tuple[EncoderName, int]) -> None:
        self._encoding = encoding
        self._pool: ProcessPoolExecutor | None = None
        self._queue: SimpleQueue[Update | logging.LogRecord] | None = None

    def start(self, job: Job) -> Future[None]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            # Its own queue too: one that is shared stays locked when a process is killed in it.
            self._queue = context.SimpleQueue()
            self._pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(self._queue, *self._encoding)
            )
        return self._pool.submit(_run, job)

    def told(self) -> list[Update | logging.LogRecord]:
        """What the process has told since the last call."""
        told: list[Update | logging.LogRecord] = []
        while self._queue and not self._queue.empty():
            told.append(self._queue.get())
        return told

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _stop(workers: list[_Worker], running: dict[Future[None], tuple[_Worker, Job]]) -> None:
    for child in multiprocessing.active_children():
        child.terminate()
    wait(running, timeout=SECONDS_TO_STOP)
    for child in multiprocessing.active_children():
        child.kill()
    for worker in workers:
        worker.close()


# ------------------------------------------------------------------ a worker, from inside

_queue: SimpleQueue[Update | logging.LogRecord]
_wanted: tuple[EncoderName, int]


class _ToParent(logging.Handler):
    """Sends log records where the bars are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None  # the arguments may not be picklable
        _queue.put(record)


def _begin(
    queue: SimpleQueue[Update | logging.LogRecord], wanted: EncoderName, threads: int
) -> None:
    global _queue, _wanted
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _queue, _wanted = queue, (wanted, threads)
    logging.basicConfig(level=logging.INFO, handlers=[_ToParent()])


def _end(*_: object) -> None:
    """By the way of an exception, so that the lock is removed, and what nobody can go on with."""
    sys.exit(143)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _run(job: Job) -> None:
    tokenizer = job.directory / "tokenizer.json"
    build(job, _encoder(tokenizer, job.dataset.end_of_text_token), _queue.put)


@lru_cache(maxsize=1)  # all jobs of a process are of one dataset
def _encoder(tokenizer: Path, end_of_text: str) -> Encoder:
    return choose_encoder(load(tokenizer, end_of_text), *_wanted)
