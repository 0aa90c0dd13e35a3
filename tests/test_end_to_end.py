"""The main job as a user runs it: shards in, bins, a trained LLaMA out; killed and resumed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from making import ROOT, SAMPLE, run_cli
from running import rows, run_trainer, start_trainer, write_config

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, object]] = {
    "model": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160},
    "data": {"context": 64},
    "batch": {"global_windows": 24, "micro_windows": 12},
    "optim": {"peak_lr": 5e-3},
    "train": {"steps": 120},
    "checkpoint": {"every": 20},
    "eval": {"every": 60, "windows": 64},
}


def run_pipeline(*arguments: object) -> None:
    """`python -m pipeline …`, which must succeed."""
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration over bins made from the sample by the commands of the README."""
    directory = tmp_path_factory.mktemp("job")
    bins, tokenizer = directory / "bins", directory / "t.json"
    run_pipeline("train-tokenizer", "--data", SAMPLE, "--vocab-size", 1024, "--out", tokenizer)
    run_pipeline("tokenize", "--data", SAMPLE, "--tokenizer", tokenizer, "--out", bins)
    run_pipeline("verify", bins)
    return write_config(directory / "small.toml", bins, **SETTINGS)


@pytest.fixture(scope="module")
def straight(config: Path) -> Path:
    """A run of that configuration on one rank, never interrupted."""
    run = config.parent / "straight"
    done = run_trainer("train", config, "--run", run)
    assert done.returncode == 0, done.stderr
    return run


def losses(run: Path) -> list[float]:
    """The loss of every step."""
    assert [row["step"] for row in rows(run)] == list(range(120))
    return [row["loss"] for row in rows(run)]


def test_the_validation_loss_ends_below_the_unigram_entropy(straight: Path) -> None:
    """Above it the model has learned less than how frequent each token is."""
    end = rows(straight, "event")[-1]
    assert rows(straight, "eval")[-1]["val_loss"] < end["unigram_entropy"]


def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    """SIGKILL in mid-step, twice; then the same command again."""
    run = tmp_path / "run"
    for steps_before_the_kill in (30, 75):
        with start_trainer("train", config, "--run", run) as process:
            limit = time.monotonic() + 60
            while not (run / "metrics.jsonl").exists() or len(rows(run)) < steps_before_the_kill:
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.01)
            process.kill()
            process.communicate()
    done = run_trainer("train", config, "--run", run)
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert losses(run) == losses(straight)
    assert [row["val_loss"] for row in rows(run, "eval")] == [
        row["val_loss"] for row in rows(straight, "eval")
    ]


@pytest.mark.parametrize("launcher", ["--ngpu", "torchrun"])
def test_two_ranks_have_the_losses_of_one(
    config: Path, straight: Path, tmp_path: Path, launcher: str
) -> None:
    """Started by the program itself or by torchrun; also resumed in between."""
    run = tmp_path / "run"
    if launcher == "torchrun":
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(
                "--nproc-per-node",
                "2",
                "-m",
                "--",
                "trainer",
                "train",
                str(config),
                "--run",
                str(run),
            ),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    else:
        done = run_trainer("train", config, "--run", run, "--ngpu", 2)
    assert done.returncode == 0, done.stderr
    assert losses(run) == pytest.approx(losses(straight), rel=1e-4)
    assert losses(run)[:20] == pytest.approx(losses(straight)[:20], rel=1e-6)
    if launcher == "--ngpu":
        before = losses(run)
        for name in ("step-000120", "step-000100"):
            shutil.rmtree(run / "checkpoints" / name)
        assert run_trainer("train", config, "--run", run, "--ngpu", 2).returncode == 0
        assert losses(run) == pytest.approx(before, rel=1e-6)


def test_a_kill_in_the_middle_of_a_save_costs_one_checkpoint(config: Path, tmp_path: Path) -> None:
    """The second checkpoint writes 60 % of a file and dies; the first is resumed (case H24)."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(DYING_SAVE)
    run = tmp_path / "run"
    died = run_trainer("train", config, "--run", run, PYTHONPATH=str(site))
    assert died.returncode == -9
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000020"]
    assert list((run / "checkpoints").glob("partial-*"))
    done = run_trainer("train", config, "--run", run, "--set", "train.steps=120")
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert "step-000020" in done.stderr
    assert not list((run / "checkpoints").glob("partial-*"))
    assert len(losses(run)) == 120


DYING_SAVE = """
import os, signal
import safetensors.torch as st
real, calls = st.save_file, [0]

def dying(tensors, filename, metadata=None):
    calls[0] += 1
    real(tensors, filename, metadata)
    if calls[0] == 3:  # each checkpoint saves weights, then moments
        with open(filename, "r+b") as file:
            file.truncate(os.path.getsize(filename) * 6 // 10)
            os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)

st.save_file = dying
"""


def test_a_run_speaks_the_same_text_for_the_same_seed(straight: Path, tmp_path: Path) -> None:
    """And without its bins: the run holds its tokenizer."""
    ask = ("sample", straight, "--prompt", "The database", "--max-tokens", 40, "--top-p", 0.9)
    first, again = run_trainer(*ask, "--seed", 3), run_trainer(*ask, "--seed", 3)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("The database")
    assert len(first.stdout) > 30
    assert first.stdout == again.stdout
    assert run_trainer(*ask, "--seed", 4).stdout != first.stdout


def test_mistakes_are_one_line(config: Path, tmp_path: Path) -> None:
    """No traceback where the user can mend it."""
    for arguments, words in (
        (("train", tmp_path / "none.toml"), "none.toml"),
        (("train", config, "--set", "optim.peek_lr=1"), "did you mean optim.peak_lr?"),
        (("train", config, "--run", tmp_path / "r", "--ngpu", 5), "5 ranks"),
        (("sample", tmp_path), "tokenizer.json"),
    ):
        done = run_trainer(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert [line for line in done.stderr.splitlines() if line.startswith("error: ")]
