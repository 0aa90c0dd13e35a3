"""Ranks: who takes part in a run, how they start, how they meet and how they end together.

A run is one plain process, or N processes that this program starts itself (`--ngpu N`), or what a
launcher such as torchrun started, which says so by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

GRACE_S = 5.0  # between asking a rank to end and killing it
SETTLE_S = 1.0  # after one rank has failed, for the others to show why


class RankError(Exception):
    """The ranks of a run cannot start, meet or go on."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of all that take part."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and tells the story."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Return when every rank has come here."""
        if self.world_size > 1:
            dist.barrier()


def tell_story(*, is_first: bool) -> None:
    """Send the log to stderr; only the first rank has something to say."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if not is_first:
        logging.disable(logging.WARNING)


# ------------------------------------------------------------------ how many, and where


def choose_ranks(device: str, num_wanted: int | None) -> tuple[str, int]:
    """What `train.device` means on this machine (cpu, cuda or mps), and how many ranks to have.

    None takes one rank a CUDA device, or one rank.

    Raises:
        RankError: the device is not there, or there are fewer CUDA devices than ranks.
    """
    num_cuda = torch.cuda.device_count()
    has_mps = torch.backends.mps.is_available()
    if (device == "cuda" and not num_cuda) or (device == "mps" and not has_mps):
        raise RankError(f"train.device is {device!r}, but torch sees none here: use auto or cpu")
    if device == "auto":
        device = "cuda" if num_cuda else "mps" if has_mps and num_wanted in (None, 1) else "cpu"
    if device == "mps" and num_wanted not in (None, 1):
        raise RankError(f"{num_wanted} ranks, but mps has one device: use train.device = 'cpu'")
    if device != "cuda":
        if num_wanted not in (None, 1):
            log.info("no CUDA device: the %d ranks run on the CPU", num_wanted)
        return device, num_wanted or 1
    return device, num_wanted or num_cuda


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher's variables say."""

    rank: int
    world_size: int
    local_rank: int
    address: str  # host:port at which rank 0 waits for the others


def launched_by(environment: Mapping[str, str]) -> Launched | None:
    """What the launcher says, or None where there is none.

    Raises:
        RankError: a part is missing or contradicts another; the variable is named.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = environment.get(name)
        if text:
            if not text.isdecimal():
                raise RankError(f"{name} is {text!r}, expected a number")
            numbers[name] = int(text)
    if numbers.get("MASTER_PORT", 0) > 65_535:
        raise RankError(f"MASTER_PORT is {numbers['MASTER_PORT']}, expected at most 65535")
    if {"RANK", "WORLD_SIZE"} <= numbers.keys() and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise RankError(
            f"RANK is {numbers['RANK']}, but WORLD_SIZE {numbers['WORLD_SIZE']} allows "
            f"0 to {numbers['WORLD_SIZE'] - 1}"
        )
    missing = [name for name in names if name not in given]
    if "RANK" in missing or "WORLD_SIZE" in missing or (missing and numbers["WORLD_SIZE"] > 1):
        raise RankError(
            f"{', '.join(given)} set, but not {', '.join(missing)}: start by torchrun, or set "
            f"all (on one machine MASTER_ADDR=127.0.0.1 MASTER_PORT=29500), or none for one process"
        )
    return Launched(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers.get("LOCAL_RANK", numbers["RANK"]),
        address=f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}",
    )


# ------------------------------------------------------------------ one rank's life


@contextmanager
def joined(launched: Launched | None, device: str, timeout_s: float) -> Generator[Ranks]:
    """This process as a rank: alone, or together with those that the launcher started.

    Raises:
        RankError: the others did not come in time, or one was lost on the way.
    """
    if launched is None or launched.world_size == 1:
        yield Ranks(rank=0, world_size=1, device=_own_device(device, 0))
        return
    with _in_group(launched, device, timeout_s, store=None) as ranks:
        yield ranks


@contextmanager
def _in_group(
    launched: Launched, device: str, timeout_s: float, store: dist.Store | None
) -> Generator[Ranks]:
    """Join the process group, through `store` or at the launcher's address, and leave it."""
    rank, world_size = launched.rank, launched.world_size
    own_device = _own_device(device, launched.local_rank)
    gloo_only = own_device.type != "cuda" or not dist.is_nccl_available()
    try:
        dist.init_process_group(
            "gloo" if gloo_only else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank if store is not None else -1,
            world_size=world_size if store is not None else -1,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistError, RuntimeError) as error:
        raise RankError(
            f"rank {rank} of {world_size} met nobody at {launched.address} within {timeout_s:g} s "
            f"(train.timeout_s): {str(error).splitlines()[0]}"
        ) from None
    try:
        yield Ranks(rank=rank, world_size=world_size, device=own_device)
    except RuntimeError as error:
        if "Connection" in str(error) or isinstance(error, dist.DistError):
            reason = str(error).splitlines()[0]
            raise RankError(f"rank {rank} of {world_size} lost another rank: {reason}") from None
        raise
    finally:
        dist.destroy_process_group()


def _own_device(device: str, local_rank: int) -> torch.device:
    """The device of one rank; on CUDA it becomes the current one."""
    if device != "cuda":
        return torch.device(device)
    present = torch.cuda.device_count()
    if local_rank >= present:
        raise RankError(f"local rank {local_rank}, but this machine has {present} CUDA devices")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


# ------------------------------------------------------------------ starting ranks ourselves


def launch(work: Callable[[Ranks], None], num_ranks: int, device: str, timeout_s: float) -> None:
    """Run `work` in `num_ranks` new processes on this machine and wait for all of them.

    They meet through a store that this process keeps on a port the system chose, so two runs on
    one machine never meet. When one rank ends badly the others are stopped; when this process
    dies the ranks end by themselves.

    Args:
        work: what each rank does; it must pickle.
        num_ranks: how many, at least 1.
        device: cpu or cuda.
        timeout_s: how long a rank waits for the others, seconds.

    Raises:
        RankError: there are fewer CUDA devices than ranks, or a rank was killed.
        Exception: what a rank raised.
    """
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise RankError(
            f"--ngpu {num_ranks}, but this machine has {torch.cuda.device_count()} CUDA devices"
        )
    store = _store("127.0.0.1", 0, num_ranks, timeout_s, is_master=True)
    threads = max(1, available_cores() // num_ranks)
    context = get_context("spawn")
    started: list[_Started] = []
    try:
        for rank in range(num_ranks):
            received, sent = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(work, rank, num_ranks, store.port, device, timeout_s, threads, sent),
                name=f"rank {rank}",
            )
            process.start()
            sent.close()  # the rank has the other copy
            started.append(_Started(process, received))
        _watch(started)
    finally:
        _stop([rank.process for rank in started])


@dataclass(frozen=True, slots=True)
class _Started:
    process: BaseProcess
    errors: Any  # multiprocessing's Connection: what the rank raised, if it could still say so


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _store(host: str, port: int, num: int, timeout_s: float, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        port,
        num,
        is_master,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        use_libuv=sys.platform != "win32",  # torch's Windows builds come without it
    )


def _watch(started: Sequence[_Started]) -> None:
    """Return when all ranks have ended well; raise what the first to fail ended with."""
    running = {rank.process.sentinel: rank for rank in started}
    while running:
        ended = _ended(running, timeout_s=None)
        if any(rank.process.exitcode for rank in ended):
            # Others fail because of the first; a moment later it shows which one was killed.
            _ended(running, SETTLE_S)
            raise _cause(started)


def _ended(running: dict[int, _Started], timeout_s: float | None) -> list[_Started]:
    """Wait for ranks to end and take them out of `running`; their exit codes are known then."""
    ready = cast(list[int], connection.wait(list(running), timeout_s))
    ended = [running.pop(sentinel) for sentinel in ready]
    for rank in ended:
        rank.process.join()  # the sentinel closes a moment before the exit code is there
    return ended


def _cause(started: Sequence[_Started]) -> Exception:
    """Why a run ended: a killed rank first, then an error that is not about another rank."""
    failed = [(rank, code) for rank in started if (code := rank.process.exitcode)]
    for rank, code in failed:
        if code < 0:
            name = signal.Signals(-code).name
            return RankError(f"{rank.process.name} was killed by {name}; the others were stopped")
    errors: list[Exception] = [rank.errors.recv() for rank, _ in failed if rank.errors.poll()]
    if not errors:
        rank, code = failed[0]
        return RankError(f"{rank.process.name} ended with exit code {code}")
    return min(errors, key=lambda error: isinstance(error, RankError))


def _stop(processes: Sequence[BaseProcess]) -> None:
    """End what still runs: ask, wait a little, kill."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    work: Callable[[Ranks], None],
    rank: int,
    num_ranks: int,
    port: int,
    device: str,
    timeout_s: float,
    threads: int,
    errors: Any,
) -> None:
    """A started rank, from its first line to its last."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tell_story(is_first=rank == 0)
    if "OMP_NUM_THREADS" not in os.environ:  # the user's own choice stands
        torch.set_num_threads(threads)
    if sys.platform == "linux":  # stay on this machine, whatever its host name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launched = Launched(
        rank=rank, world_size=num_ranks, local_rank=rank, address=f"127.0.0.1:{port}"
    )
    try:
        store = _store("127.0.0.1", port, num_ranks, timeout_s, is_master=False)
        with _in_group(launched, device, timeout_s, store) as ranks:
            work(ranks)
    except Exception as error:  # noqa: BLE001 (the parent raises it)
        error.add_note(f"in rank {rank}:\n{traceback.format_exc()}")
        errors.send(error)
        sys.exit(1)
    except KeyboardInterrupt:  # Ctrl-C reaches every process; the parent says so
        sys.exit(1)


def _end_with_parent() -> None:
    """Leave no orphan: a rank whose parent was killed is of no use to anybody."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
