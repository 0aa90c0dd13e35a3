"""One shard to its bins."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import zstandard
from making import (
    bytes_dataset,
    frame,
    line,
    num_tokens,
    run_measured,
    write_bytes_tokenizer,
    write_shard,
)

from pipeline.bpe import load, train
from pipeline.build import Job, Update, build, held_out, is_built
from pipeline.encoders import Encoder, ParityError, choose_encoder, is_checked
from pipeline.lock import LockedError
from pipeline.shards import Shard, ShardError
from pipeline.tokenbin import BinPaths, read_receipt


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = write_bytes_tokenizer(tmp_path_factory.mktemp("t") / "tokenizer.json")
    return choose_encoder(load(path))


def job(source: Path, **changes: object) -> Job:
    """Build `source` into `bins` beside it."""
    directory = source.parent / "bins"
    dataset = bytes_dataset(**changes)
    shard = Shard(source.name.partition(".")[0], source)
    return Job(shard=shard, split="train", directory=directory, dataset=dataset)


def run(job: Job, encoder: Encoder) -> list[Update]:
    updates: list[Update] = []
    build(job, encoder, updates.append)
    return updates


def files(job: Job) -> dict[str, bytes]:
    """All that lies in the dataset's folder."""
    found = sorted(path for path in job.directory.rglob("*") if path.is_file())
    return {str(path.relative_to(job.directory)): path.read_bytes() for path in found}


def test_documents_end_with_end_of_text(tmp_path: Path, encoder: Encoder) -> None:
    """Without it neighbours run into each other, and nobody notices."""
    work = job(write_shard(tmp_path / "00.jsonl.zst", ["a", "bb", "ccc", ""]))
    (update,) = run(work, encoder)
    assert update == ("00", 4, 6, work.shard.num_bytes)
    content = (work.directory / "train" / "00.bin").read_bytes()
    assert np.frombuffer(content, "<u2").tolist() == [
        *(97, 256),
        *(98, 98, 256),
        *(99, 99, 99, 256),
        256,
    ]


def test_what_is_built_is_left_alone(tmp_path: Path, encoder: Encoder) -> None:
    """A run of thirty shards that was stopped at the last one must not begin anew."""
    work = job(write_shard(tmp_path / "00.jsonl.zst", ["a"] * 9))
    assert not is_built(work)
    assert run(work, encoder)
    before = files(work)
    assert is_built(work)
    assert run(work, encoder) == []
    assert files(work) == before


def test_a_source_that_was_only_touched_is_not_built_again(
    tmp_path: Path, encoder: Encoder
) -> None:
    """A copy of the data has new times and the same content."""
    source = write_shard(tmp_path / "00.jsonl.zst", ["a"] * 9)
    work = job(source)
    run(work, encoder)
    receipt = work.outputs[0].receipt
    os.utime(receipt, (0, 0))
    assert not is_built(work)
    assert run(work, encoder) == []
    assert is_built(work)


def test_a_source_that_changed_is_built_again(tmp_path: Path, encoder: Encoder) -> None:
    """Of the same size or not: bins of another text than the receipt tells are worth nothing."""
    for texts in (["ab"], ["ba"], ["ab", "c"]):
        source = write_shard(tmp_path / "00.jsonl", texts)
        work = job(source)
        if work.outputs[0].receipt.exists():
            os.utime(work.outputs[0].receipt, (0, 0))
        assert run(work, encoder)
        assert read_receipt(work.outputs[0].receipt).tokens == num_tokens(texts)


@pytest.mark.parametrize("name", ["00.bin", "00.docs.npy", "00.json"])
@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_bin_that_is_not_whole_is_built_again(
    tmp_path: Path, encoder: Encoder, name: str, damage: str
) -> None:
    """The receipt alone proves nothing."""
    work = job(write_shard(tmp_path / "00.jsonl.zst", ["a"] * 9))
    run(work, encoder)
    before = files(work)
    path = work.directory / "train" / name
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    assert not is_built(work)
    assert run(work, encoder)
    assert files(work) == before


def test_what_a_killed_build_left_is_replaced(tmp_path: Path, encoder: Encoder) -> None:
    """Its partial files are of no use, and must not be in the way."""
    work = job(write_shard(tmp_path / "00.jsonl.zst", ["a"] * 9))
    run(work, encoder)
    before = files(work)
    (work.directory / "train" / "00.json").unlink()
    (work.directory / "train" / "00.bin.partial").write_bytes(b"left over" * 1000)
    run(work, encoder)
    assert files(work) == before


def test_a_frame_without_documents_makes_an_empty_bin(tmp_path: Path, encoder: Encoder) -> None:
    """It is a shard with nothing in it, unlike an empty file."""
    source = tmp_path / "00.jsonl.zst"
    source.write_bytes(frame(b""))
    work = job(source)
    run(work, encoder)
    receipt = read_receipt(work.outputs[0].receipt)
    assert (receipt.documents, receipt.tokens, receipt.max_id) == (0, 0, -1)
    assert (work.directory / "train" / "00.bin").read_bytes() == b""
    assert is_built(work)


ROWS: list[object] = ["good one", None, ..., 7, ["a"], {"a": 1}, "good two"]


def write_rows(path: Path) -> Path:
    """Two documents among lines that are none."""
    rows = [b'{"meta": {}}\n' if row is ... else line(row) for row in ROWS]
    path.write_bytes(frame(b"".join(rows)))
    return path


def test_rejects_are_listed_and_counted(tmp_path: Path, encoder: Encoder) -> None:
    """What was left out must be told, and to be found again."""
    work = job(write_rows(tmp_path / "00.jsonl.zst"), max_reject_share=1.0)
    run(work, encoder)
    receipt = read_receipt(work.outputs[0].receipt)
    assert (receipt.documents, receipt.tokens) == (2, 18)
    assert receipt.rejects == {
        "text is null": 1,
        "no text": 1,
        "text is number": 1,
        "text is array": 1,
        "text is object": 1,
    }
    listed = work.outputs[0].rejects.read_text().splitlines()
    assert listed[0] == '{"line": 2, "byte": 21, "reason": "text is null"}'
    assert len(listed) == 5


def test_too_many_rejects_fail_the_shard(tmp_path: Path, encoder: Encoder) -> None:
    """A shard of another shape must not pass for one with a few bad lines."""
    work = job(write_rows(tmp_path / "00.jsonl.zst"))
    with pytest.raises(
        ShardError, match=r"00\.jsonl\.zst: 5 of 7 .* 71\.43% .* 1\.00%: 00:2: text is null; 00:3: "
    ):
        run(work, encoder)
    assert files(work) == {}


def test_lone_surrogates_are_rejected_or_mended(tmp_path: Path, encoder: Encoder) -> None:
    """Half an emoji kills many an encoder, hours into a run."""
    source = tmp_path / "00.jsonl.zst"
    source.write_bytes(
        frame(
            rb'{"text":"plain"}' + b"\n" + rb'{"text":"hi \ud83d there"}' + b"\n"
            rb'{"text":"lo \ude00 there"}' + b"\n" + rb'{"text":"ok \ud83d\ude00"}' + b"\n"
        )
    )
    for repair, expected in ((False, (2, {"lone surrogate": 2}, 14)), (True, (4, {}, 40))):
        work = job(source, max_reject_share=1.0, repair=repair)
        (work.directory / "train" / "00.json").unlink(missing_ok=True)
        run(work, encoder)
        receipt = read_receipt(work.outputs[0].receipt)
        assert (receipt.documents, receipt.rejects, receipt.tokens) == expected


def test_the_hold_out_keeps_copies_of_a_text_together(tmp_path: Path, encoder: Encoder) -> None:
    """The Pile holds many documents two or three times: they would leak into validation."""
    texts = [f"document {n % 100}" for n in range(300)]
    work = job(write_shard(tmp_path / "00.jsonl.zst", texts), holdout=0.2)
    run(work, encoder)
    assert is_built(work)
    lines: dict[str, list[int]] = {}
    for paths in work.outputs:
        rows = np.load(paths.docs)
        lines[paths.split] = rows["line"].tolist()
    assert sorted(lines["train"] + lines["val"]) == list(range(1, 301))
    taken = {texts[number - 1] for number in lines["val"]}
    assert len(lines["val"]) == 3 * len(taken)
    assert taken == {text for text in texts if held_out(text, 0.2)}
    assert 10 <= len(taken) <= 30
    (work.directory / "val" / "00.json").unlink()
    assert not is_built(work)


@pytest.mark.parametrize(("holdout", "expected"), [(0.0, 0), (1 - 1e-16, 200), (0.5, 100)])
def test_a_hold_out_takes_its_share(holdout: float, expected: int) -> None:
    """The share is of the documents, whatever they are."""
    taken = sum(held_out(str(n), holdout) for n in range(200))
    assert taken == pytest.approx(expected, abs=25)


def test_a_shard_that_somebody_builds_is_left_to_them(tmp_path: Path, encoder: Encoder) -> None:
    """Two writers of one bin would mix their bytes."""
    work = job(write_shard(tmp_path / "00.jsonl.zst", ["a"]))
    lock = work.directory / "train" / "00.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text('{"host": "elsewhere", "pid": 1, "time": "now"}')
    with pytest.raises(LockedError, match="process 1 on elsewhere"):
        run(work, encoder)
    assert set(files(work)) == {"train/00.lock"}


def test_a_damaged_shard_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, encoder: Encoder
) -> None:
    """A bad download must not cost the good bin of yesterday."""
    source = write_shard(tmp_path / "00.jsonl.zst", ["a"] * 9)
    work = job(source)
    run(work, encoder)
    before = files(work)
    source.write_bytes(source.read_bytes()[:-3])
    with pytest.raises(ShardError, match="cut off"):
        run(work, encoder)
    assert files(work) == before


def peak_of_tokenizing(folder: Path, num_bytes: int) -> int:
    """Bytes of memory that the command takes at most for a shard of so many lines."""
    digits = random.Random(0)
    words = ["".join(digits.choice("ab") for _ in range(200)) for _ in range(50)]
    content = b"".join(line(" ".join(digits.choices(words, k=50))) for _ in range(100))
    source = folder / str(num_bytes) / "data" / "00.jsonl.zst"
    source.parent.mkdir(parents=True)
    with source.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as compressor:
        for _ in range(num_bytes // len(content)):
            compressor.write(content)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        tokenizer.write_bytes(train(words * 2, 4096))
    arguments = ("tokenize", "--data", source.parent, "--tokenizer", tokenizer)
    arguments += ("--out", source.parent.with_name("bins"), "--workers", 1, "--holdout", 0)
    return run_measured(*arguments)[1]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="has no rusage")
def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    """A shard of The Pile is larger than the machine, and there is one in each worker."""
    small, large = (peak_of_tokenizing(tmp_path, size) for size in (100_000_000, 300_000_000))
    assert large - small < 30_000_000
    assert large < 600_000_000


def test_the_receipt_tells_what_it_was_made_with(tmp_path: Path, encoder: Encoder) -> None:
    """Years later it is the only witness, and two runs must agree to the byte."""
    work = job(write_shard(tmp_path / "00.jsonl.zst", ["a"], subset="ArXiv"))
    run(work, encoder)
    receipt = read_receipt(work.outputs[0].receipt)
    assert receipt.source
    assert (receipt.source.name, receipt.source.size) == ("00.jsonl.zst", work.shard.num_bytes)
    assert receipt.encoder == encoder.name
    assert set(receipt.versions) == {"numpy", "orjson", "zstandard"}
    assert list(receipt.subsets) == ["ArXiv"]
    paths = BinPaths(work.directory, "train", "00")
    assert {path.name for path in paths.bin.parent.iterdir()} == {
        "00.bin",
        "00.docs.npy",
        "00.json",
    }


def test_a_difference_in_mid_shard_starts_it_over_with_the_reference(
    tmp_path: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a shard of wrong ids must not stay, and the run must not end over it."""
    swapped = load(write_bytes_tokenizer(tmp_path / "other.json", swap={ord("q"): ord("z")}))
    reference = choose_encoder(load(write_bytes_tokenizer(tmp_path / "t.json")), "tokenizers")
    encode = choose_encoder(swapped, "tokenizers").encode_batch
    wrong = Encoder("another 1.0", encode, None, reference=reference, fallback=reference)
    checked = next(text for n in range(10**5) if is_checked(text := f"{n} quick"))
    texts = ["plain " * 100_000] * 5 + [checked]
    work = job(write_shard(tmp_path / "data" / "00.jsonl.zst", texts))
    updates = run(work, wrong)
    assert [update.documents for update in updates].count(2) == 2  # it began twice
    assert f"00: begun anew with the reference: another 1.0 differs from {reference.name}" in (
        caplog.text
    )
    receipt = read_receipt(work.outputs[0].receipt)
    assert (receipt.encoder, receipt.tokens) == (reference.name, num_tokens(texts))
    work.outputs[0].receipt.unlink()
    forced = Encoder("another 1.0", encode, None, reference=reference)
    with pytest.raises(ParityError, match=r"another 1\.0 differs"):
        run(work, forced)
