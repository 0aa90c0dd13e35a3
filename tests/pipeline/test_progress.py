"""What is shown while shards are built."""

import logging
from pathlib import Path

import pytest
from making import bytes_dataset, write_shard

from pipeline.build import Job, Update
from pipeline.progress import Meter, Progress
from pipeline.shards import Shard


def test_a_meter_tells_pace_and_time_left() -> None:
    """Whether a run takes an hour or a week should be known in its first minute."""
    meter = Meter(400, documents=12_345, text_bytes=50_000_000, source_bytes=100)
    meter.started -= 10
    assert str(meter) == "12,345 documents, 5.0 MB/s, 0:00:30 left"
    meter.source_bytes = 400
    assert str(meter) == "12,345 documents, 5.0 MB/s"


def test_without_a_terminal_each_shard_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bars in a batch system's log are thousands of lines of rubbish."""
    shard = Shard("00", write_shard(tmp_path / "00.jsonl", ["a"] * 10))
    job = Job(shard=shard, split="train", directory=tmp_path, dataset=bytes_dataset())
    with caplog.at_level(logging.INFO), Progress([job]) as progress:
        progress.begin("00")
        progress.update(Update("00", 4, 4, 50))
        progress.update(Update("00", 10, 10, shard.num_bytes))
        progress.finish("00")
    (row,) = caplog.messages
    assert row.startswith("00: 10 documents, ")
    assert row.endswith("(1 of 1 shards)")
