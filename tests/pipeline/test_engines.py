"""Shard jobs in processes: none lost, none left behind."""

import os
import platform
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from making import (
    ROOT,
    bytes_dataset,
    command,
    contents,
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
        bpe = load(jobs[0].directory / "tokenizer.json") if jobs else None
        return run_local(jobs, bpe, "auto", workers, progress)


def write_slow_shards(folder: Path, count: int) -> dict[str, int]:
    """Shards that take seconds each: words that no cache knows. Tokens, by shard."""
    tokens: dict[str, int] = {}
    for number in range(count):
        digits = random.Random(number)
        texts = [" ".join(str(digits.random()) for _ in range(150)) for _ in range(2000)]
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
    """The command with two workers and the slow encoder, in a session of its own."""
    write_bytes_tokenizer(folder / "tokenizer.json")
    arguments = ["tokenize", "--data", folder / "data", "--out", folder / "bins", "--workers", 2]
    return subprocess.Popen(
        command("pipeline", *arguments, "--holdout", 0, "--encoder", "tokenizers"),
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "said").open("w"),
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
    if sent == signal.SIGINT:  # as a terminal sends it: to all
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    assert process.wait(timeout=20) == (128 + sent if sent != signal.SIGKILL else -sent)
    wait_for_end(process.pid)
    assert built_tokens(tmp_path).items() < tokens.items()
    if sent != signal.SIGKILL:
        assert not list(tmp_path.rglob("*.partial"))  # it was too short to commit anything
        assert not list(tmp_path.rglob("*.lock"))
        said = [row for row in (tmp_path / "said").read_text().splitlines() if " INFO " not in row]
        assert len(said) == 1
        assert said[0].endswith("ERROR stopped: run the same command again to go on")
    again = start_tokenize(tmp_path)
    assert again.wait(timeout=60) == 0
    assert built_tokens(tmp_path) == tokens
    straight = tmp_path / "straight"
    done = run_cli(
        *("tokenize", "--data", tmp_path / "data", "--tokenizer", tmp_path / "tokenizer.json"),
        *("--out", straight, "--holdout", 0, "--encoder", "tokenizers"),
    )
    assert done.returncode == 0, done.stderr
    for path in straight.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "bins" / path.relative_to(straight)).read_bytes()


# ------------------------------------------------------------------ several runs, one folder


def tokenize_into(folder: Path, bins: str) -> list[object]:
    places = ["--data", folder / "data", "--tokenizer", folder / "tokenizer.json"]
    return ["tokenize", *places, "--out", folder / bins, "--workers", 1, "--holdout", 0.2]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("pipeline", *arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_two_runs_started_at_once_on_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A job array was submitted twice, or two machines share the folder."""
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    for number in range(4):
        texts = [f"{number} {n} " * 20 for n in range(300)]
        write_shard(tmp_path / "data" / f"0{number}.jsonl.zst", texts)
    runs = [start(*tokenize_into(tmp_path, "bins")) for _ in range(2)]
    for process in runs:
        _, said = process.communicate(timeout=60)
        faults = [row for row in said.splitlines() if " ERROR " in row]
        assert process.returncode == bool(faults), said
        assert all(" has been at it since " in row or "shards failed" in row for row in faults)
    again = run_cli(*tokenize_into(tmp_path, "bins"))
    assert again.returncode == 0, again.stderr
    alone = run_cli(*tokenize_into(tmp_path, "alone"))
    assert alone.returncode == 0, alone.stderr
    assert contents(tmp_path / "bins") == contents(tmp_path / "alone")


@posix
@pytest.mark.slow
def test_a_run_that_is_stopped_for_a_while_keeps_its_shard(tmp_path: Path) -> None:
    """Ctrl-Z, a suspended laptop, a batch system that makes room: its writer will go on."""
    tokens = write_slow_shards(tmp_path, 1)
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    first = start(*tokenize_into(tmp_path, "bins"))
    wait_for("00.bin.partial", tmp_path)
    first.send_signal(signal.SIGSTOP)
    second = run_cli(*tokenize_into(tmp_path, "bins"))
    assert second.returncode == 1
    assert f"00.lock: process {first.pid} on {platform.node()}" in second.stderr
    assert "if it is no more, remove this file and run again" in second.stderr
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 0, said
    receipts = [tmp_path / "bins" / split / "00.json" for split in ("train", "val")]
    assert sum(read_receipt(receipt).tokens for receipt in receipts) == tokens["00"]


# ------------------------------------------------------------------ a full disk


def in_little_room(kind: str, folder: Path, bins: Path) -> list[str]:
    """A shell's command line that runs what follows it where BINS cannot grow beyond 300 kB."""
    script = {
        "a file's limit": 'ulimit -f 300 && "$@"',
        # In a name space of its own, as an ordinary user may; what was written is copied out.
        "a disk": f'mount -t tmpfs -o size=300k none {bins} && {{ "$@"; code=$?; '
        f"cp -r {bins} {folder}/left && mount -o remount,size=64m {bins} && "
        f'"$@"; echo $? > {folder}/second; cp -r {bins} {folder}/found; exit $code; }}',
    }[kind]
    shell = ["bash", "-c", script, "bash"]
    return (
        shell
        if kind == "a file's limit"
        else ["unshare", "--user", "--map-root-user", "--mount", *shell]
    )


def can_mount() -> bool:
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none"]
    try:
        return subprocess.run([*unshare, "/mnt"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
@pytest.mark.parametrize("kind", ["a file's limit", pytest.param("a disk", marks=pytest.mark.slow)])
def test_a_full_disk_is_said_in_one_line_and_gone_on_with(tmp_path: Path, kind: str) -> None:
    """What it needs, not a traceback; and after the hours it had taken, not from the beginning."""
    if kind == "a disk" and not can_mount():
        pytest.skip("mounting needs a user name space or a privileged container")
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    texts = [f"{n} " + "words and words " * 100 for n in range(300)]  # 2 bytes a byte of text
    write_shard(tmp_path / "data" / "00.jsonl.zst", texts)
    (tmp_path / "bins").mkdir()
    hooks = os.pathsep.join(map(str, (ROOT / "tests" / "hooks", ROOT)))
    done = subprocess.run(
        [
            *in_little_room(kind, tmp_path, tmp_path / "bins"),
            *command("pipeline", *tokenize_into(tmp_path, "bins")),
        ],
        cwd=ROOT,
        env=environment(PYTHONPATH=hooks),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    faults = [row for row in done.stderr.splitlines() if " ERROR " in row]
    assert len(faults) == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "bins/train/00." in faults[0]
    reason = "No space left on device" if kind == "a disk" else "File too large"
    assert f"{reason}: the bins of 00 take about " in faults[0]
    assert faults[1].endswith("1 of 1 shards failed: 00")
    limited = kind == "a file's limit"
    left, found = (tmp_path / ("bins" if limited else name) for name in ("left", "found"))
    assert not list(left.rglob("00.bin")) + list(left.rglob("00.json"))
    if limited:
        again = run_cli(*tokenize_into(tmp_path, "bins"))
        assert again.returncode == 0, again.stderr
        assert "00: going on after line " in again.stderr
    else:
        assert (tmp_path / "second").read_text() == "0\n"
        assert "00: going on after line " in done.stderr
    alone = run_cli(*tokenize_into(tmp_path, "alone"))
    assert alone.returncode == 0, alone.stderr
    assert contents(found) == contents(tmp_path / "alone")
