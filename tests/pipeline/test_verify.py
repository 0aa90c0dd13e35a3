"""Re-reading a dataset: each kind of damage is found and named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from making import line, run_cli, write_bytes_tokenizer

from pipeline import verify
from pipeline.bpe import load
from pipeline.build import Job, build
from pipeline.encoders import choose_encoder
from pipeline.plan import new_dataset
from pipeline.shards import find_shards
from pipeline.tokenbin import BinPaths, Receipt, create_dataset, read_receipt, write_receipt
from pipeline.verify import faults, source_faults, strays

TEXTS = [f"text {n} é" for n in range(40)]


@pytest.fixture
def paths(tmp_path: Path) -> BinPaths:
    """A dataset with a hold-out and a few rejects; the train bin of shard 07."""
    rows = [line(text, "ab"[n % 2]) for n, text in enumerate(TEXTS)]
    (tmp_path / "07.jsonl").write_bytes(b"".join([*rows[:20], line(None), *rows[20:]]))
    bpe = load(write_bytes_tokenizer(tmp_path / "tokenizer.json"))
    dataset = new_dataset(bpe, "uint16", holdout=0.2, max_reject_share=0.1)
    directory = tmp_path / "bins"
    create_dataset(directory, dataset, bpe.content)
    (shard,) = find_shards(tmp_path)
    job = Job(shard=shard, split="train", directory=directory, dataset=dataset)
    build(job, choose_encoder(bpe), lambda _: None)
    return BinPaths(directory, "train", "07")


def edit_receipt(**changes: object) -> Callable[[BinPaths], None]:
    def edit(paths: BinPaths) -> None:
        write_receipt(paths.receipt, replace(read_receipt(paths.receipt), **changes))

    return edit


def edit_tokens(place: int, token: int) -> Callable[[BinPaths], None]:
    def edit(paths: BinPaths) -> None:
        tokens = np.fromfile(paths.bin, "<u2")
        tokens[place] = token
        tokens.tofile(paths.bin)

    return edit


def edit_index(field: str, row: int, value: int) -> Callable[[BinPaths], None]:
    def edit(paths: BinPaths) -> None:
        rows = np.load(paths.docs)
        rows[field][row] = value
        np.save(paths.docs, rows)

    return edit


def edit_dataset(**changes: object) -> Callable[[BinPaths], None]:
    def edit(paths: BinPaths) -> None:
        path = paths.directory / "dataset.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def test_a_sound_dataset_has_no_faults(paths: BinPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarms are ignored, and true ones after them; blocks must not show in the result."""
    assert list(faults(paths.directory)) == []
    monkeypatch.setattr(verify, "BLOCK_BYTES", 6)
    assert list(faults(paths.directory)) == []
    assert strays(paths.directory) == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (edit_tokens(3, 300), ["token 3 has id 300, but the vocabulary has 257", "sha256"]),
        (edit_tokens(3, 256), ["document 1 ends after token 4, but the index says", "sha256"]),
        (edit_tokens(3, 65), ["07.bin: sha256"]),
        (edit_tokens(-1, 65), ["end-of-text ids for"]),
        (edit_index("end_token", 2, 1), ["end_token does not grow", "document 3 ends after"]),
        (edit_index("line", 2, 1), ["line does not grow at document 2"]),
        (edit_index("text_bytes", 2, 1000), ["text_bytes in all", "docs.npy: sha256"]),
        (edit_index("subset", 2, 9), ["document 3 is of subset 9 of 2"]),
        (edit_index("flags", -1, 2), ["has flags 2"]),
        (edit_index("flags", 1, 8), ["document 2 has flags 8"]),
        (edit_receipt(max_id=200), ["largest id 256, but the receipt says 200"]),
        (edit_receipt(documents=3), ["documents, but the receipt says 3"]),
        (edit_receipt(tokens=3), ["receipt says 3 tokens of uint16 (6 bytes)"]),
        (edit_receipt(rejects={}), ["rejects.jsonl: {'text is null': 1}, but the receipt says {}"]),
        (edit_receipt(shard="08"), ["it is of train/08"]),
        (edit_dataset(vocab_size=200), ["vocabulary bound 257, but dataset.json says 200"]),
        (edit_dataset(tokenizer_sha256="0"), ["tokenizer.json: sha256"]),
        (edit_dataset(end_of_text_token="A"), ["end-of-text id 65"]),
        (lambda paths: paths.docs.write_bytes(b"x"), ["07.docs.npy: not an index"]),
        (lambda paths: np.save(paths.docs, np.zeros(3)), ["rows of float64"]),
        (lambda paths: paths.bin.unlink(), ["07.bin"]),
        (lambda paths: paths.rejects.unlink(), ["rejects.jsonl: {}"]),
        (lambda paths: paths.receipt.write_text("{"), ["07.json: not JSON"]),
        (lambda paths: paths.receipt.unlink(), ["train: no bins"]),
        (lambda paths: (paths.directory / "tokenizer.json").write_text("{}"), ["not a tokenizer"]),
    ],
)
def test_each_damage_is_named(
    paths: BinPaths, damage: Callable[[BinPaths], None], expected: list[str]
) -> None:
    """What is not found here is found by the loss curve, weeks later."""
    damage(paths)
    found = list(faults(paths.directory))
    for part in expected:
        assert any(part in fault for fault in found), found
    assert all("\n" not in fault for fault in found)


def test_a_subset_that_lost_documents_to_another_is_named(paths: BinPaths) -> None:
    """The sums agree, and the per-subset losses would still be wrong."""
    receipt: Receipt = read_receipt(paths.receipt)
    counts = dict(zip(receipt.subsets, reversed(receipt.subsets.values()), strict=True))
    edit_receipt(subsets=counts)(paths)
    found = list(faults(paths.directory))
    assert len(found) == 2
    assert "07.docs.npy: a: Counts(documents=" in found[0]


def test_what_belongs_to_no_bin_is_mentioned(paths: BinPaths) -> None:
    """A bin without a receipt does not exist, but somebody may think that it does."""
    left = paths.bin.with_name("08.bin.partial")
    left.touch()
    assert strays(paths.directory) == [left]
    done = run_cli("verify", paths.directory)
    assert done.returncode == 0
    assert f"{left}: belongs to no finished bin" in done.stderr
    assert [json.loads(row)["split"] for row in done.stdout.splitlines()] == ["train", "val"]


def test_the_command_fails_with_a_line_for_each_fault(paths: BinPaths) -> None:
    """A script that goes on to train reads the exit code only."""
    edit_tokens(3, 300)(paths)
    done = run_cli("verify", paths.directory)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "token 3 has id 300" in done.stderr
    assert "Traceback" not in done.stderr
    missing = run_cli("verify", paths.directory / "nowhere")
    assert missing.returncode == 1
    assert len(missing.stderr.splitlines()) == 1
    assert "dataset.json: there is no such file" in missing.stderr


def test_bins_of_another_shard_than_the_one_there_are_named(paths: BinPaths) -> None:
    """Damage that was there before the first reading shows in nothing else."""
    data = paths.directory.parent
    assert list(source_faults(paths.directory, data)) == []
    assert run_cli("verify", paths.directory, "--source", data).returncode == 0
    source = data / "07.jsonl"
    content = source.read_bytes()
    source.write_bytes(content.replace(b"text 1 ", b"test 1 "))
    found = list(source_faults(paths.directory, data))
    assert len(found) == 2  # train and val
    assert all("07.jsonl: sha256 " in fault for fault in found)
    source.write_bytes(content + b"\n")
    assert "bytes, but" in next(source_faults(paths.directory, data))
    done = run_cli("verify", paths.directory, "--source", data)
    assert done.returncode == 1
    assert "07.jsonl: " in done.stderr
    (data / "train").mkdir()
    source.write_bytes(content)
    source.rename(data / "train" / "07.jsonl")
    assert list(source_faults(paths.directory, data)) == []
    assert "made from 07.jsonl, which is not in" in next(source_faults(paths.directory, data / "x"))
