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
from multiprocessing.queues import SimpleQueue

from pipeline.bpe import Encoder, load
from pipeline.build import Job, Update, build
from pipeline.lock import LockedError
from pipeline.progress import Progress
from pipeline.shards import ShardError
from pipeline.tokenbin import TokenBinError

SECONDS_TO_STOP = 5.0  # that a worker has to clean up after itself

# What a job can come to without a fault of ours.
FAILURES = (ShardError, TokenBinError, LockedError, OSError, MemoryError, BrokenProcessPool)

log = logging.getLogger(__name__)


def run_local(jobs: list[Job], workers: int, progress: Progress) -> dict[str, str]:
    """Build shards; the failures, by shard, one line each.

    One that fails does not stop the others.

    Args:
        jobs: all of one dataset; the largest shards go first, so that none is left at the end.
        workers: processes, at most. A single one needs none of its own.
        progress: told how the jobs come along.
    """
    if not jobs:
        return {}
    queue = sorted(jobs, key=lambda job: job.shard.num_bytes)
    num_processes = min(workers, len(jobs))
    threads = max(1, workers // num_processes)
    if num_processes == 1:
        return _run_here(queue, threads, progress)
    return _run_in_processes(queue, num_processes, threads, progress)


def _run_here(queue: list[Job], threads: int, progress: Progress) -> dict[str, str]:
    failures: dict[str, str] = {}
    encoder = _encoder(queue[0], threads)
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
    queue: list[Job], num_processes: int, threads: int, progress: Progress
) -> dict[str, str]:
    failures: dict[str, str] = {}
    running: dict[Future[None], tuple[_Worker, Job]] = {}
    workers = [_Worker(queue[0], threads) for _ in range(num_processes)]
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


def _encoder(job: Job, threads: int) -> Encoder:
    """The dataset's encoder; the thread settings count until the library's first batch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    return Encoder(load(job.directory / "tokenizer.json", job.dataset.end_of_text_token))


# ------------------------------------------------------------------ a worker, from the parent


class _Worker:
    """A process that builds one shard at a time; if it is killed, the next job gets a new one."""

    def __init__(self, job: Job, threads: int) -> None:
        self._begin = (job, threads)
        self._pool: ProcessPoolExecutor | None = None
        self._queue: SimpleQueue[Update | logging.LogRecord] | None = None

    def start(self, job: Job) -> Future[None]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            # Its own queue too: one that is shared stays locked when a process is killed in it.
            self._queue = context.SimpleQueue()
            self._pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(self._queue, *self._begin)
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

_encode_with: Encoder  # of this process, for all its jobs
_queue: SimpleQueue[Update | logging.LogRecord]


class _ToParent(logging.Handler):
    """Sends log records where the bars are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None  # the arguments may not be picklable
        _queue.put(record)


def _begin(queue: SimpleQueue[Update | logging.LogRecord], job: Job, threads: int) -> None:
    global _encode_with, _queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _queue = queue
    logging.basicConfig(level=logging.INFO, handlers=[_ToParent()])
    _encode_with = _encoder(job, threads)


def _end(*_: object) -> None:
    """By the way of an exception, so that the lock is removed, and what nobody can go on with."""
    sys.exit(143)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _run(job: Job) -> None:
    build(job, _encode_with, _queue.put)
