"""The benchmark of the pipeline: that it runs, and counts what it says it counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from making import ROOT, SAMPLE, environment, write_bytes_tokenizer

COMMAND = [sys.executable, ROOT / "benchmarks" / "pipeline" / "compare.py"]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="it asks for what a child process took")


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, (*COMMAND, *arguments))],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_our_own_part_runs_and_is_measured(tmp_path: Path) -> None:
    """A benchmark that only its author can run proves nothing."""
    tokenizer = write_bytes_tokenizer(tmp_path / "tokenizer.json")
    done = compare(
        *("--data", SAMPLE, "--tokenizer", tokenizer, "--repeats", 1, "--times", 2),
        *("--only", "piledriver,its", "--scratch", tmp_path, "--peers", tmp_path / "peers"),
    )
    assert done.returncode == 0, done.stderr
    fast, reference = map(json.loads, done.stdout.splitlines())
    assert (fast["tool"], reference["tool"]) == (
        "piledriver",
        "its reference: --encoder tokenizers",
    )
    documents = fast["tokens"] - fast["text_mb"] * 1e6  # a byte is a token here, and one ends each
    assert 0 < documents < 1000
    assert fast["tokens"] == reference["tokens"]
    assert 0 < fast["cpu_s"] < 60
    assert 20 < fast["peak_mb"] < 600
    assert "| piledriver | 1 |" in done.stderr
    assert not (tmp_path / "peers").exists()


def test_a_tool_that_fails_is_named(tmp_path: Path) -> None:
    """Half a table would be taken for a whole one."""
    done = compare("--data", SAMPLE, "--tokenizer", tmp_path / "none.json", "--only", "piledriver")
    assert done.returncode == 1
    assert "piledriver: exit code 1" in done.stderr
    assert "none.json: there is no such file" in done.stderr
