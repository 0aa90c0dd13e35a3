"""`python -m trainer`: train a run, and let it speak."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

# OpenMP's threads spin while they wait: where another program wants the cores too, a step takes
# several times as long. It reads this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import click
import torch

from model.generate import SamplingError
from model.llama import ContextLengthError, ModelConfigError
from model.memory import NotEnoughMemoryError
from model.weights import WeightsError
from pipeline.tokenbin import TokenBinError
from trainer.checkpoint import CheckpointError
from trainer.config import ConfigError, load_config
from trainer.loop import make_plan, train
from trainer.metrics import MetricsError
from trainer.ranks import RankError, choose_ranks, joined, launch, launched_by, tell_story
from trainer.run import RunError
from trainer.sample import SampleError, sample
from trainer.windows import WindowError

MISTAKES = (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    MetricsError,
    ModelConfigError,
    NotEnoughMemoryError,
    OSError,
    RankError,
    RunError,
    SampleError,
    SamplingError,
    TokenBinError,
    WeightsError,
    WindowError,
)


@contextmanager
def one_line_errors() -> Generator[None]:
    """End with one line on stderr and exit code 1 where the user can mend it."""
    try:
        yield
    except MISTAKES as error:
        raise SystemExit(f"error: {error}") from None


@click.group(context_settings={"max_content_width": 100, "show_default": True})
def main() -> None:
    """Train a LLaMA on token bins."""
    tell_story(is_first=os.environ.get("RANK", "0") == "0")


@main.command("train")
@click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option(
    "--run", type=click.Path(path_type=Path), help="Run directory [default: runs/<CONFIG>]"
)
@click.option("--ngpu", type=click.IntRange(min=1), help="Ranks to start: GPUs, or CPU processes.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one.")
@click.option("--resume-anyway", is_flag=True, help="Go on although the data's order has changed.")
def train_command(
    config_path: Path,
    run: Path | None,
    ngpu: int | None,
    settings: tuple[str, ...],
    resume_anyway: bool,
) -> None:
    """Train as CONFIG (a TOML file) says, or go on where the run stopped.

    Example: python -m trainer train configs/tiny.toml --set data.bins=bins/demo/pile --ngpu 2
    """
    with one_line_errors():
        config = load_config(config_path, settings)
        directory = run or Path(config.run.directory)
        config = replace(config, run=replace(config.run, directory=directory.as_posix()))
        launched = launched_by(os.environ)
        device, num_ranks = choose_ranks(
            config.train.device, launched.world_size if launched else ngpu or config.train.ngpu
        )
        timeout_s = config.train.timeout_s
        if launched is not None or num_ranks == 1:
            with joined(launched, device, timeout_s) as ranks:
                train(config, ranks, resume_anyway=resume_anyway)
            return
        # What can be refused is refused here once, not by every rank.
        make_plan(config, num_ranks, None if device == "cuda" else torch.device(device))
        work = partial(train, config, resume_anyway=resume_anyway)
        launch(work, num_ranks, device, timeout_s)


@main.command("sample")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue; none starts a document.")
@click.option("--checkpoint", metavar="step-N", help="Which one [default: the newest valid]")
@click.option("--max-tokens", default=200, type=click.IntRange(min=1), help="Tokens at most.")
@click.option("--temperature", default=0.8, type=click.FloatRange(min=0), help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(min=1), help="Only the k likeliest tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="The likeliest p of all.")
@click.option("--seed", default=0, help="Same seed, same text.")
def sample_command(
    run: Path,
    prompt: str,
    checkpoint: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> None:
    """Write the text that RUN's model makes of a prompt.

    Example: python -m trainer sample runs/tiny --prompt "The " --temperature 0.7 --top-p 0.9
    """
    with one_line_errors():
        text = sample(
            run,
            prompt,
            checkpoint=checkpoint,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )
        click.echo(text)


if __name__ == "__main__":
    main(prog_name="python -m trainer")
