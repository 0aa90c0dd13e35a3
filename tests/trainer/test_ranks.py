"""Ranks start, meet and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import letters, rows, run_trainer, start_trainer, write_bins, write_config

from trainer.ranks import RankError, choose_ranks, launched_by


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "0 to 1"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "'two'"),
    ],
)
def test_contradictory_launcher_variables_are_named(
    environment: dict[str, str], words: str
) -> None:
    """Otherwise the run dies of a KeyError, or waits for ever (case H27)."""
    with pytest.raises(RankError, match=words):
        launched_by(environment)


def test_without_launcher_variables_nothing_was_launched() -> None:
    """A stray MASTER_PORT in the environment must not turn a plain run into a rank."""
    assert launched_by({}) is None
    assert launched_by({"MASTER_PORT": "29500", "LOCAL_RANK": "0"}) is None


def test_one_rank_of_one_needs_no_address() -> None:
    """Schedulers set RANK=0 WORLD_SIZE=1 for a single task."""
    launched = launched_by({"RANK": "0", "WORLD_SIZE": "1"})
    assert launched is not None
    assert (launched.rank, launched.world_size) == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without CUDA does")
def test_without_cuda_the_ranks_run_on_the_cpu() -> None:
    """`make train NGPU=4` must work on a laptop, and say where it runs."""
    assert choose_ranks("cpu", 4) == ("cpu", 4)
    assert choose_ranks("cpu", None) == ("cpu", 1)
    with pytest.raises(RankError, match="cuda"):
        choose_ranks("cuda", 1)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that trains for longer than any test waits."""
    directory = tmp_path_factory.mktemp("endless")
    bins = write_bins(directory / "bins", {"00": letters(4000)})
    return write_config(directory / "c.toml", bins, train={"steps": 1_000_000, "timeout_s": 60})


@pytest.mark.slow
def test_alone_of_two_gives_up_naming_the_address(endless: Path, tmp_path: Path) -> None:
    """The library's own limit is half an hour of silence (case H27)."""
    begun = time.monotonic()
    ended = run_trainer(
        "train", endless, "--run", tmp_path / "run", "--set", "train.timeout_s=3",
        RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
    )  # fmt: skip
    assert ended.returncode == 1
    assert "127.0.0.1:" in ended.stderr
    assert "timeout_s" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - begun < 60


def free_port() -> str:
    """A port that was free a moment ago."""
    code = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def children_of(pid: int) -> list[int]:
    """The Python processes that a process has started and that still run."""
    text = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(line) for line in text.split()]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(happened: object, seconds: float = 60) -> None:
    """Poll a question until its answer is yes."""
    limit = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.05)


def started_pair(config: Path, run: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A two-rank run that has done its first steps, and the pids of its ranks."""
    process = start_trainer("train", config, "--run", run, "--ngpu", 2)
    metrics = run / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (metrics.exists() and len(rows(run)) > 3))
    assert process.poll() is None, process.communicate()[1]
    named = [
        pid
        for pid in children_of(process.pid)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(named) == 2
    return process, named


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
def test_a_killed_rank_ends_the_run_and_is_named(endless: Path, tmp_path: Path) -> None:
    """Otherwise the others wait for it until somebody looks."""
    process, ranks = started_pair(endless, tmp_path / "run")
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert not any(map(is_running, ranks))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
def test_a_killed_parent_leaves_no_orphans(endless: Path, tmp_path: Path) -> None:
    """Orphans keep the GPUs' memory, and the next run fails for no visible reason."""
    process, ranks = started_pair(endless, tmp_path / "run")
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(map(is_running, ranks)))
