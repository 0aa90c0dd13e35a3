"""Going on inside a shard: stopped anywhere, a build ends with the files of one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import (
    ROOT,
    bytes_dataset,
    command,
    contents,
    environment,
    frame,
    line,
    run_cli,
    wait_for_end,
    write_bytes_tokenizer,
)

from pipeline import build as building
from pipeline.bpe import load
from pipeline.build import Job, Update, build, is_built
from pipeline.encoders import Encoder, choose_encoder
from pipeline.journal import Journal
from pipeline.lock import this_host
from pipeline.shards import Shard, ShardError
from pipeline.tokenbin import TokenRangeError, partial, read_record, write_whole


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return choose_encoder(
        load(write_bytes_tokenizer(tmp_path_factory.mktemp("t") / "tokenizer.json"))
    )


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small shards have several."""
    monkeypatch.setattr(building, "BATCH_BYTES", 300)


def rows(count: int, seed: int = 0) -> list[bytes]:
    """Documents of several subsets, one of which comes late, among rejects and blank lines."""
    chance = random.Random(seed)
    made: list[bytes] = []
    for number in range(count):
        subset = "late" if number > count // 2 and number % 5 == 0 else chance.choice("ab")
        made.append(line(f"{number} é " * chance.randrange(1, 12), subset))
        if number % 9 == 4:
            made.append(chance.choice([line(None), b"\n", b"oops\n"]))
    return made


def write_rows(path: Path, made: list[bytes]) -> Path:
    """A shard of these lines in three frames."""
    third = len(made) // 3
    parts = (made[:third], made[third : 2 * third], made[2 * third :])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(frame(b"".join(part)) for part in parts))
    return path


def plan(source: Path, bins: str = "bins") -> Job:
    return Job(
        shard=Shard("07", source),
        split="train",
        directory=source.parent / bins,
        dataset=bytes_dataset(holdout=0.3, max_reject_share=0.5),
    )


def stop_after(batches: int) -> Callable[[Update], None]:
    """A report that ends the build, as Ctrl-C does."""
    left = [batches]

    def report(_: Update) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return report


def stop(job: Job, encoder: Encoder, batches: int = 3) -> None:
    """A build that commits after every batch, and is stopped after so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "SECONDS_TO_COMMIT", 0.0)
        with pytest.raises(KeyboardInterrupt):
            build(job, encoder, stop_after(batches))
    assert job.journal.exists()


def straight(source: Path, encoder: Encoder) -> dict[str, bytes]:
    """What a build that is never stopped makes."""
    job = plan(source, "straight")  # once for all tests of a source
    build(job, encoder, lambda _: None)
    return contents(job.directory)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of six batches."""
    return write_rows(tmp_path_factory.mktemp("short") / "07.jsonl.zst", rows(24))


@settings(max_examples=10, deadline=None)
@given(
    stops=st.lists(st.integers(0, 4), max_size=3).filter(lambda stops: sum(stops) < 4),
    tail=st.binary(max_size=40),
)
def test_wherever_it_stops_the_files_come_out_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    encoder: Encoder,
    short: Path,
    stops: list[int],
    tail: bytes,
) -> None:
    """Twice in the bin, or never, is what a document is that lies at the seam."""
    expected = straight(short, encoder)
    job = replace(plan(short), directory=tmp_path_factory.mktemp("stop") / "bins")
    for batches in stops:
        stop(job, encoder, batches)
        for path in job.directory.rglob("*.partial"):  # what came after the last commit
            with path.open("ab") as file:
                file.write(tail)
    build(job, encoder, lambda _: None)
    assert contents(job.directory) == expected
    assert is_built(job)


def test_what_was_committed_is_not_encoded_again(tmp_path: Path, encoder: Encoder) -> None:
    """A kill after an hour must not cost the hour."""
    job = plan(write_rows(tmp_path / "07.jsonl.zst", rows(60)))
    stop(job, encoder, 8)
    end = read_record(job.journal, Journal).end
    updates: list[Update] = []
    build(job, encoder, updates.append)
    assert updates[0].documents > end.documents > 30


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edit_journal(job: Job, **changes: object) -> None:
    """Let the journal say that it was made otherwise."""
    record = json.loads(job.journal.read_bytes())
    record["making"] |= changes
    job.journal.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda job: flip(partial(job.outputs[0].bin), 5), "07.bin.partial: it does not begin"),
        (lambda job: flip(partial(job.outputs[1].docs), 200), "docs.npy.partial: it does not"),
        (lambda job: flip(partial(job.outputs[0].rejects), 5), "rejects.jsonl.partial: it does"),
        (lambda job: partial(job.outputs[1].bin).unlink(), "val/07.bin: it does not begin"),
        (lambda job: os.truncate(partial(job.outputs[0].bin), 9), "it does not begin with the"),
        (lambda job: job.journal.write_text("{"), "07.journal: not JSON"),
        (lambda job: edit_journal(job, encoder="fast 1.0"), "made with encoder fast 1.0"),
        (lambda job: edit_journal(job, versions={}), "made with versions {}"),
        (lambda job: edit_journal(job, source="8.jsonl"), "made with source 8.jsonl"),
        (lambda job: write_rows(job.shard.path, rows(60, seed=1)), "it is not the file it was"),
        (lambda job: write_rows(job.shard.path, rows(5)), "it is not the file it was"),
    ],
)
def test_what_has_changed_since_is_begun_anew(
    tmp_path: Path,
    encoder: Encoder,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Job], None],
    said: str,
) -> None:
    """Half of one bin and half of another have the right size and no sense."""
    job = plan(write_rows(tmp_path / "07.jsonl.zst", rows(60)))
    stop(job, encoder)
    damage(job)
    build(job, encoder, lambda _: None)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert told.startswith("07: begun anew: ")
    assert said in told
    assert contents(job.directory) == straight(job.shard.path, encoder)


def test_another_dataset_goes_on_with_nothing(
    tmp_path: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    """Its dtype, its hold-out or its repair would begin in the middle of a bin."""
    job = plan(write_rows(tmp_path / "07.jsonl.zst", rows(60)))
    stop(job, encoder)
    job = replace(job, dataset=bytes_dataset(holdout=0.3, max_reject_share=0.5, repair=True))
    build(job, encoder, lambda _: None)
    assert "07: begun anew: " in caplog.text
    assert "made with another dataset.json" in caplog.text


def test_a_shard_that_grew_is_gone_on_with(tmp_path: Path, encoder: Encoder) -> None:
    """Only what was committed has to be the same."""
    made = rows(80)
    job = plan(write_rows(tmp_path / "07.jsonl.zst", made[:60]))
    stop(job, encoder)
    with job.shard.path.open("ab") as file:
        file.write(frame(b"".join(made[60:])))
    build(job, encoder, lambda _: None)
    assert contents(job.directory) == straight(job.shard.path, encoder)


def damaged(job: Job) -> None:
    job.shard.path.write_bytes(job.shard.path.read_bytes()[:-3])


def too_many_rejects(job: Job) -> None:
    with job.shard.path.open("ab") as file:
        file.write(frame(b"oops\n" * 200))


def out_of_range(job: Job) -> None:
    with job.shard.path.open("ab") as file:
        file.write(frame(line("~")))


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (damaged, ShardError, "cut off"),
        (too_many_rejects, ShardError, r"allows 50\.00%: 07:\d+: [^;]*; 07:\d+: [^;]*; 07:\d+: "),
        (out_of_range, TokenRangeError, "token id 300"),
    ],
)
def test_what_fails_for_good_leaves_nothing(
    tmp_path: Path,
    fault: Callable[[Job], None],
    error: type[Exception],
    said: str,
) -> None:
    """It would fail in the same way again, and its files would stay for ever."""
    tokenizer = write_bytes_tokenizer(tmp_path / "tokenizer.json", 301, {ord("~"): 300})
    encoder = choose_encoder(load(tokenizer))
    job = plan(write_rows(tmp_path / "07.jsonl.zst", rows(60)))
    stop(job, encoder)
    fault(job)
    with pytest.raises(error, match=said):
        build(job, encoder, lambda _: None)
    assert contents(job.directory) == {}


@pytest.mark.parametrize("finished", [["train/07.bin"], ["train/07.bin", "train/07.docs.npy"]])
def test_killed_between_two_names_it_takes_the_first_one_back(
    tmp_path: Path, encoder: Encoder, finished: list[str]
) -> None:
    """The last second of an hour is a moment as any other."""
    job = plan(write_rows(tmp_path / "07.jsonl.zst", rows(60)))
    stop(job, encoder, 9)
    for name in finished:
        path = job.directory / name
        partial(path).rename(path)
    build(job, encoder, lambda _: None)
    assert contents(job.directory) == straight(job.shard.path, encoder)


def test_killed_before_it_has_cleared_away_the_next_run_does(
    tmp_path: Path, encoder: Encoder
) -> None:
    """All is built, so nobody would look there again."""
    job = plan(write_rows(tmp_path / "07.jsonl.zst", rows(30)))
    build(job, encoder, lambda _: None)
    before = contents(job.directory)
    ended = subprocess.Popen(command("this"), stdout=subprocess.DEVNULL)
    ended.wait()
    write_whole(job.journal, b"{}")
    partial(job.journal).touch()
    lock = {"host": this_host(), "pid": ended.pid, "time": "then"}
    job.lock.write_text(json.dumps(lock))
    assert not is_built(job)
    build(job, encoder, lambda _: None)
    assert contents(job.directory) == before
    assert is_built(job)


# ------------------------------------------------------------------ real kills


@dataclass(frozen=True)
class Undisturbed:
    """DATA, what a run that nobody kills makes of it, and how much there is to kill in it."""

    folder: Path
    bins: dict[str, bytes]
    seconds: float
    operations: dict[str, int]  # on the file system, by kind of process


def tokenize(folder: Path, bins: Path, workers: int) -> list[object]:
    places = ["--data", folder / "data", "--tokenizer", folder / "tokenizer.json", "--out", bins]
    return ["tokenize", *places, "--workers", workers, "--holdout", 0.2, "--max-reject-share", 0.5]


def hooked(**variables: object) -> dict[str, str]:
    """The environment in which shards are hurried and processes die."""
    paths = os.pathsep.join(map(str, (ROOT / "tests" / "hooks", ROOT)))
    return environment(PYTHONPATH=paths, **{name: str(v) for name, v in variables.items()})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_bytes_tokenizer(folder / "tokenizer.json")
    for number in range(3):
        made = rows(2500 + 1500 * number, seed=number)
        write_rows(folder / "data" / f"0{number}.jsonl.zst", made)
    (folder / "counts").mkdir()
    began = time.monotonic()
    subprocess.run(
        command("pipeline", *tokenize(folder, folder / "counted", 2)),
        cwd=ROOT,
        env=hooked(COUNT_IN=folder / "counts"),
        check=True,
        capture_output=True,
    )
    seconds = time.monotonic() - began
    operations = {path.name: path.stat().st_size for path in (folder / "counts").iterdir()}
    done = run_cli(*tokenize(folder, folder / "bins", 1))
    assert done.returncode == 0, done.stderr
    bins = contents(folder / "bins")
    assert contents(folder / "counted") == bins
    return Undisturbed(folder, bins, seconds, operations)


def kill_somewhere(run: Undisturbed, bins: Path, chance: random.Random) -> str:
    """Start the command and kill some of it at some moment; what was done, for the record."""
    kind = chance.choice(["worker", "worker", "worker", "parent", "all", "owner"])
    variables: dict[str, object] = {}
    if kind == "worker" or (kind == "parent" and chance.random() < 0.3):
        at = chance.randint(1, run.operations[kind] // (2 if kind == "worker" else 1))
        variables = {"KILL_IN": kind, "KILL_AT": at}
    process = subprocess.Popen(
        command("pipeline", *tokenize(run.folder, bins, 2)),
        cwd=ROOT,
        env=hooked(**variables),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    told = f"{kind} before its operation {variables.get('KILL_AT')}"
    if not variables:
        while process.poll() is None and not list(bins.rglob("*.lock")):
            time.sleep(0.005)
        after = chance.uniform(0, run.seconds / 2)  # the other half is the start
        time.sleep(after)
        kill(process, kind, bins, chance)
        told = f"{kind} {after:.2f} s after the first lock"
    process.wait(timeout=60)
    wait_for_end(process.pid)
    begun = sum(1 for _ in bins.rglob("*.journal"))
    built = sum(1 for _ in bins.rglob("0?.json"))
    return f"{told} ({built} of 6 bins, {begun} journals)"


def kill(process: subprocess.Popen[bytes], kind: str, bins: Path, chance: random.Random) -> None:
    """The parent, the whole session as a power cut does, or the owner of some lock."""
    if process.poll() is not None:
        return
    if kind == "parent":
        process.kill()
    elif kind == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif locks := sorted(bins.rglob("*.lock")):
        with suppress(FileNotFoundError, ProcessLookupError):  # finished just now
            os.kill(json.loads(chance.choice(locks).read_bytes())["pid"], signal.SIGKILL)


def assert_kills_change_nothing(run: Undisturbed, folder: Path, seed: int) -> None:
    """One or two kills, then an ordinary run: the same files, and no other."""
    chance = random.Random(seed)
    bins = folder / f"bins-{seed}"
    told = [kill_somewhere(run, bins, chance) for _ in range(chance.choice([1, 1, 2]))]
    unfinished = [
        path.stem
        for path in bins.rglob("*.journal")
        if not all((bins / split / f"{path.stem}.json").exists() for split in ("train", "val"))
    ]
    for receipt in bins.rglob("0?.json"):  # where there is one, its bin is whole already
        of_bin = str(receipt.with_suffix(".bin").relative_to(bins))
        assert (bins / of_bin).read_bytes() == run.bins[of_bin], (seed, told)
    done = run_cli(*tokenize(run.folder, bins, chance.choice([1, 2])))
    again = done.stderr.count("going on after line")
    record = f"seed {seed}: killed {', then '.join(told)}; {again} shards gone on with"
    print(record)  # noqa: T201
    assert done.returncode == 0, (record, done.stderr)
    found = contents(bins)
    assert found.keys() == run.bins.keys(), record
    assert found == run.bins, record
    assert "begun anew" not in done.stderr, (record, done.stderr)
    assert again == len(unfinished), record


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="kills processes by signals")
@pytest.mark.parametrize("seed", range(10))
def test_a_run_killed_at_any_moment_is_gone_on_with(
    undisturbed: Undisturbed, tmp_path: Path, seed: int
) -> None:
    """Power cuts, the memory killer and time limits do not wait for the end of a shard."""
    assert_kills_change_nothing(undisturbed, tmp_path, seed)


@pytest.mark.accept
@pytest.mark.skipif(os.name == "nt", reason="kills processes by signals")
@pytest.mark.parametrize("seed", range(100, 140))
def test_a_run_killed_at_many_moments_is_gone_on_with(
    undisturbed: Undisturbed, tmp_path: Path, seed: int
) -> None:
    """The same, oftener."""
    assert_kills_change_nothing(undisturbed, tmp_path, seed)
