"""Which shards there are, and reading them."""

import hashlib
import os
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from making import frame, line, skippable_frame, write_shard

from pipeline.shards import Batch, Shard, ShardError, ShardReader, find_shards, find_validation
from pipeline.tokenbin import TokenBinError

quick = settings(max_examples=40, deadline=None)


def read(path: Path, **options: int) -> Batch:
    """All batches of a shard in one."""
    whole = Batch()
    for batch in ShardReader(Shard("00", path), **options):
        for name in ("texts", "lines", "text_bytes", "subsets", "rejects"):
            getattr(whole, name).extend(getattr(batch, name))
    return whole


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ------------------------------------------------------------------ which ones


@pytest.fixture
def data(tmp_path: Path) -> Path:
    names = ["00", "01", "02", "05", "extra", "val", "test", ".03"]
    for name in names:
        write_shard(tmp_path / f"{name}.jsonl.zst", ["a"])
    (tmp_path / "notes.jsonl.bak").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("all", "00 01 02 05 extra"),
        ("00-02", "00 01 02"),
        ("0-2", "00 01 02"),
        ("1", "01"),
        ("00,02,05-05", "00 02 05"),
        (" 5 , 0-1", "00 01 05"),
        ("1,01,0-2", "00 01 02"),
        ("extra,000", "00 extra"),
    ],
)
def test_shards_are_chosen_by_number_or_name(data: Path, wanted: str, names: str) -> None:
    """The wrong shard would be tokenized, or one of them twice."""
    assert [shard.name for shard in find_shards(data, wanted)] == names.split()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("00-05", "asks for 03, 04, which are not there; there are 00, 01, 02, 05, extra"),
        ("7", "no shard '7'; there are 00"),
        ("0-999999999", "asks for 3, 4, 6, 7, 8, which"),
        ("5-3", "backwards"),
        ("1,,2", "no shard ''"),
        ("val", "never trained on"),
        ("0,test", "never trained on"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(data: Path, wanted: str, message: str) -> None:
    """A missing shard that is skipped would be missed after the training."""
    with pytest.raises((ShardError, TokenBinError), match=message):
        find_shards(data, wanted)


@pytest.mark.parametrize("twin", ["1.jsonl.zst", "01.jsonl", "train/01.jsonl.zst"])
def test_two_files_of_one_number_are_refused(data: Path, twin: str) -> None:
    """The same documents would be trained on twice, or the older file would win."""
    write_shard(data / twin, ["a"])
    for wanted in ("all", "01", "0-2"):
        with pytest.raises(ShardError, match="same number or name"):
            find_shards(data, wanted)
    assert [shard.name for shard in find_shards(data, "00,02")] == ["00", "02"]


def test_shards_may_lie_in_the_train_folder(tmp_path: Path) -> None:
    """The mirrors of The Pile lay them out so."""
    write_shard(tmp_path / "train" / "00.jsonl.zst", ["a"])
    write_shard(tmp_path / "val.jsonl.zst", ["a"])
    assert [shard.path.parent.name for shard in find_shards(tmp_path)] == ["train"]
    assert find_validation(tmp_path) == Shard("val", tmp_path / "val.jsonl.zst")


def test_without_shards_or_folder_it_is_said(tmp_path: Path) -> None:
    """An empty list of shards would be a run that does nothing and succeeds."""
    with pytest.raises(ShardError, match="no such folder"):
        find_shards(tmp_path / "nowhere")
    with pytest.raises(ShardError, match=r"no .jsonl.zst or .jsonl files"):
        find_shards(tmp_path)
    assert find_validation(tmp_path) is None


# ------------------------------------------------------------------ reading


def test_every_frame_of_a_file_is_read(tmp_path: Path) -> None:
    """Most readers stop after the first frame, or at an empty one, and say nothing."""
    first, second = [f"a{n}" for n in range(5)], [f"b{n}" for n in range(7)]
    content = (
        frame(b"".join(map(line, first)))
        + frame(b"")
        + skippable_frame(b"note")
        + frame(b"".join(map(line, second)))
    )
    assert read(put(tmp_path / "00.jsonl.zst", content)).texts == first + second
    content = skippable_frame(b"") + frame(b"") + content
    assert read(put(tmp_path / "00.jsonl.zst", content)).texts == first + second


@quick
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=10),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    batch_bytes=st.integers(1, 300),
)
def test_any_split_into_frames_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cuts: list[int], batch_bytes: int
) -> None:
    """Archives are joined and appended to; where frames end must not matter."""
    content = b"".join(map(line, texts))
    places = [0, *sorted(cuts), len(content)]
    frames = [frame(content[a:b]) for a, b in pairwise(places)]
    path = put(tmp_path_factory.mktemp("shard") / "00.jsonl.zst", b"".join(frames))
    whole = read(path, batch_bytes=batch_bytes)
    assert whole.texts == texts
    assert whole.lines == list(range(1, len(texts) + 1))
    assert whole.text_bytes == [len(text.encode()) for text in texts]


SHARD = frame(b"".join(line(f"document {n} " * 20) for n in range(50)))


@quick
@given(size=st.integers(0, len(SHARD) - 1))
def test_a_shard_cut_at_any_byte_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    """An interrupted download must not pass for a shorter shard."""
    path = put(tmp_path_factory.mktemp("cut") / "07.jsonl.zst", SHARD[:size])
    with pytest.raises(ShardError, match=r"07\.jsonl\.zst"):
        read(path)


@quick
@given(place=st.integers(0, len(SHARD) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_an_error_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """The checksum is there to be looked at."""
    damaged = bytearray(SHARD)
    damaged[place] ^= 1 << bit
    path = put(tmp_path_factory.mktemp("bit") / "07.jsonl.zst", bytes(damaged))
    try:
        texts = read(path).texts
    except ShardError:
        return
    assert texts == [f"document {n} " * 20 for n in range(50)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (line("plain text"), "no zstd frame, at byte 0"),
        (b"version https://git-lfs.github.com/spec/v1\n", "starts with b'version https"),
        (b"<html><body>404</body></html>", "starts with b'<html>"),
        (frame(line("a")) + b"rubbish", "no zstd frame, at byte"),
        (skippable_frame(b"note")[:-1], "cut off inside the zstd frame"),
    ],
)
def test_what_is_no_zstd_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """A failed download is an error page, a pointer file or nothing at all."""
    path = put(tmp_path / "03.jsonl.zst", content)
    with pytest.raises(ShardError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_of_two_gigabytes_is_read(tmp_path: Path) -> None:
    """`zstd --ultra --long=31` writes such frames, and the library's own limit is lower."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = compressor.compress(line("wide")) + compressor.flush()
    assert read(put(tmp_path / "00.jsonl.zst", content)).texts == ["wide"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """Splitting text lines breaks documents at U+2028, U+0085 and carriage returns."""
    texts = ["one\u2028two", "three\u2029four", "five\u0085six", "crlf", "tab\there", "last"]
    rows = [line(text) for text in texts]
    rows[3] = rows[3][:-1] + b"\r\n"
    rows[5] = rows[5][:-1]
    for name, content in (("0.jsonl", b"".join(rows)), ("1.jsonl.zst", frame(b"".join(rows)))):
        whole = read(put(tmp_path / name, content))
        assert (whole.texts, whole.rejects) == (texts, [])


def test_lines_and_bytes_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    """A reject that is reported elsewhere cannot be found."""
    content = line("a") + b"\n \t\r\n" + line(None) + line("b") + b"oops"
    whole = read(put(tmp_path / "00.jsonl", content), batch_bytes=1)
    assert whole.lines == [1, 5]
    assert whole.rejects == [
        (4, content.index(b'{"text": null'), "text is null"),
        (6, content.index(b"oops"), "not JSON"),
    ]


def test_a_byte_order_mark_is_dropped_where_a_file_or_frame_opens_with_it(tmp_path: Path) -> None:
    """Joined files have one at each seam; elsewhere it is somebody's text."""
    mark = b"\xef\xbb\xbf"
    inside = line("\ufeffkept")
    opening = frame(mark + line("a") + inside) + frame(mark + line("b"))
    whole = read(put(tmp_path / "00.jsonl.zst", opening))
    assert (whole.texts, whole.rejects) == (["a", "\ufeffkept", "b"], [])
    whole = read(put(tmp_path / "01.jsonl", mark + line("a") + mark + line("b")))
    assert (whole.texts, [reject.line for reject in whole.rejects]) == (["a"], [2])
    half = line("split")
    whole = read(put(tmp_path / "02.jsonl.zst", frame(half[:5]) + frame(mark + half[5:])))
    assert whole.texts == []


def test_the_source_is_hashed_on_the_way(tmp_path: Path) -> None:
    """The receipt tells by it whether the shard has changed since."""
    path = write_shard(tmp_path / "00.jsonl.zst", ["a"] * 1000)
    reader = ShardReader(Shard("00", path))
    assert sum(len(batch.texts) for batch in reader) == 1000
    assert reader.source.name == "00.jsonl.zst"
    assert reader.source.size == path.stat().st_size
    assert reader.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
@pytest.mark.parametrize("change", ["grows", "shrinks", "is replaced", "is touched"])
def test_a_shard_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, suffix: str, change: str
) -> None:
    """A download that still runs would be half of a shard, or a mix of two."""
    digits = random.Random(0)
    texts = [digits.randbytes(200).hex() for _ in range(10_000)]  # more than is read ahead
    path = write_shard(tmp_path / f"00{suffix}", texts)
    os.utime(path, (1e9, 1e9))
    batches = iter(ShardReader(Shard("00", path), batch_bytes=1000))
    next(batches)
    if change == "grows":
        with path.open("ab") as file:
            file.write(frame(line("more")) if suffix.endswith("zst") else line("more"))
    elif change == "shrinks":
        os.truncate(path, path.stat().st_size - 1000)
    elif change == "is replaced":
        write_shard(tmp_path / f"new{suffix}", texts).replace(path)
    else:
        os.utime(path, (1e9, 2e9))
    with pytest.raises(ShardError, match="changed while it was read"):
        list(batches)


def test_memory_is_bounded_by_the_largest_document(tmp_path: Path) -> None:
    """A shard of 43 GB has to pass through a machine that has less."""
    rows = [line("word " * 20_000)] * 640  # 64 MB that compress to almost nothing
    path = put(tmp_path / "00.jsonl.zst", frame(b"".join(rows)))
    del rows
    tracemalloc.start()
    try:
        num_documents = sum(len(batch.texts) for batch in ShardReader(Shard("00", path)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_documents == 640
    assert peak < 30_000_000
