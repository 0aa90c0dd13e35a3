"""Shard jobs in processes: none lost, none left behind."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from making import (
    ROOT,
    bytes_dataset,
    command,
    environment,
    num_tokens,
    run_cli,
    wait_for_end,
    write_bytes_tokenizer,
    write_shard,
)

from pipeline.bpe import load
from pipeline.build import Job
from pipeline.engines import run_local
from pipeline.progress import Progress
from pipeline.shards import find_shards
from pipeline.tokenbin import create_dataset, read_receipt

posix = pytest.mark.skipif(os.name == "nt", reason="kills processes by signals")


def plan(folder: Path) -> list[Job]:
    """Jobs for all shards of DATA in `folder`."""
    bpe = load(write_bytes_tokenizer(folder / "tokenizer.json"))
    dataset = bytes_dataset(tokenizer_sha256=bpe.sha256)
    create_dataset(folder / "bins", dataset, bpe.content)
    return [
        Job(shard=shard, split="train", directory=folder / "bins", dataset=dataset)
        for shard in find_shards(folder / "data")
    ]


def run(jobs: list[Job], workers: int) -> dict[str, str]:
    with Progress(jobs) as progress:
        return run_local(jobs, workers, progress)


def write_slow_shards(folder: Path, count: int) -> dict[str, int]:
    """Shards that take about a second each: words that no cache knows. Tokens, by shard."""
    tokens: dict[str, int] = {}
    for number in range(count):
        digits = random.Random(number)
        texts = [" ".join(str(digits.random()) for _ in range(150)) for _ in range(400)]
        write_shard(folder / "data" / f"{number:02d}.jsonl.zst", texts)
        tokens[f"{number:02d}"] = num_tokens(texts)
    return tokens


def built_tokens(folder: Path) -> dict[str, int]:
    receipts = (folder / "bins" / "train").glob("*.json")
    return {path.stem: read_receipt(path).tokens for path in receipts}


def wait_for(pattern: str, folder: Path) -> Path:
    """The first file of that pattern, as soon as it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := next(iter(sorted(folder.rglob(pattern))), None):
            return found
        time.sleep(0.005)
    raise TimeoutError(f"no {pattern} in {folder}")


def start_tokenize(folder: Path) -> subprocess.Popen[bytes]:
    """The command with two workers, in a session of its own."""
    write_bytes_tokenizer(folder / "tokenizer.json")
    arguments = ["tokenize", "--data", folder / "data", "--out", folder / "bins", "--workers", 2]
    return subprocess.Popen(
        command("pipeline", *arguments, "--holdout", 0),
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_a_failing_shard_does_not_stop_the_others(tmp_path: Path) -> None:
    """The other twenty-nine would wait for a person, whatever the number of workers."""
    texts = [f"document {n}" for n in range(20)]
    for number in range(4):
        path = write_shard(tmp_path / "data" / f"0{number}.jsonl.zst", texts)
        if number == 2:
            path.write_bytes(path.read_bytes()[:-5])
    jobs = plan(tmp_path)
    for workers in (1, 2):
        failures = run(jobs, workers)
        assert failures.keys() == {"02"}
        assert "02.jsonl.zst: cut off" in failures["02"]
        assert built_tokens(tmp_path) == dict.fromkeys(("00", "01", "03"), num_tokens(texts))
        for path in (tmp_path / "bins" / "train").iterdir():
            path.unlink()
    assert run([], 2) == {}


@posix
@pytest.mark.slow
def test_a_killed_worker_costs_its_own_shard_and_no_other(tmp_path: Path) -> None:
    """The system kills the process that holds the longest document when memory is short."""
    tokens = write_slow_shards(tmp_path, 4)
    process = start_tokenize(tmp_path)
    lock = wait_for("00.lock", tmp_path)
    owner = int(lock.read_text().partition('"pid": ')[2].partition(",")[0])
    os.kill(owner, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    wait_for_end(process.pid)
    assert built_tokens(tmp_path) == {name: tokens[name] for name in ("01", "02", "03")}
    again = run_cli(
        *("tokenize", "--data", tmp_path / "data", "--out", tmp_path / "bins"),
        *("--holdout", 0, "--workers", 1),
    )
    assert again.returncode == 0, again.stderr
    assert built_tokens(tmp_path) == tokens


@posix
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_process_and_is_taken_up(
    tmp_path: Path, sent: signal.Signals
) -> None:
    """Orphans would hold the locks, and half a bin would be trained on."""
    tokens = write_slow_shards(tmp_path, 3)
    process = start_tokenize(tmp_path)
    wait_for("*.bin.partial", tmp_path)
    time.sleep(0.1)
    process.send_signal(sent)
    assert process.wait(timeout=20) != 0
    wait_for_end(process.pid)
    assert built_tokens(tmp_path).items() < tokens.items()
    if sent != signal.SIGKILL:
        assert not list(tmp_path.rglob("*.partial"))
        assert not list(tmp_path.rglob("*.lock"))
    again = start_tokenize(tmp_path)
    assert again.wait(timeout=60) == 0
    assert built_tokens(tmp_path) == tokens
    straight = tmp_path / "straight"
    done = run_cli(
        *("tokenize", "--data", tmp_path / "data", "--tokenizer", tmp_path / "tokenizer.json"),
        *("--out", straight, "--holdout", 0, "--workers", 1),
    )
    assert done.returncode == 0, done.stderr
    for path in straight.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "bins" / path.relative_to(straight)).read_bytes()
