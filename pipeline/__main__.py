"""The pipeline's commands. What they do is in the modules; here are their options."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Literal

import click

from pipeline.adopt import adopt as adopt_bin
from pipeline.bpe import Pattern, TokenizerError, load, require_memory, train
from pipeline.build import Job, is_built
from pipeline.encoders import EncoderName
from pipeline.engines import run_local
from pipeline.lock import LockedError
from pipeline.plan import (
    DEFAULT_HOLDOUT,
    TEXT_PER_COMPRESSED_BYTE,
    choose_dtype,
    choose_validation,
    concerns,
    estimate_bytes,
    new_dataset,
    require_space,
)
from pipeline.progress import Progress
from pipeline.sampling import draw
from pipeline.shards import ShardError, find_shards
from pipeline.stats import table, totals
from pipeline.tokenbin import (
    Receipt,
    Split,
    TokenBinError,
    built,
    create_dataset,
    read_receipt,
    write_whole,
)
from pipeline.verify import SPLITS, faults, source_faults, strays

BINS = Path("bins/pile")

log = logging.getLogger("pipeline")
path = click.Path(path_type=Path)

data_option = click.option(
    "--data",
    type=path,
    default=Path("data/pile"),
    show_default=True,
    help="Folder with the shards, *.jsonl.zst or *.jsonl, in it or in its train/.",
)
shards_option = click.option(
    "--shards",
    default="all",
    show_default=True,
    help="Which ones: 00-29, 00,02,05-07, names, or all.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Shards of documents to token bins."""


@cli.command("train-tokenizer")
@data_option
@shards_option
@click.option("--vocab-size", type=click.IntRange(1), default=50257, show_default=True)
@click.option(
    "--out",
    type=path,
    default=BINS.parent / "tokenizer.json",
    show_default=True,
    help="The tokenizer.json to write.",
)
@click.option(
    "--sample-bytes",
    type=click.IntRange(1),
    default=500_000_000,
    show_default=True,
    help="Text to train on, drawn over all the shards.",
)
@click.option("--seed", default=0, show_default=True, help="Of the sample.")
@click.option(
    "--pattern",
    type=click.Choice(["gpt2", "llama3"]),
    default="gpt2",
    show_default=True,
    help="How text is cut into words.",
)
@click.option(
    "--min-frequency",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="How often a pair must occur to become an entry.",
)
def train_tokenizer(
    data: Path,
    shards: str,
    vocab_size: int,
    out: Path,
    sample_bytes: int,
    seed: int,
    pattern: Pattern,
    min_frequency: int,
) -> None:
    """Train a byte-level BPE on a sample of the shards."""
    chosen = find_shards(data, shards)
    there = sum(s.num_bytes * (TEXT_PER_COMPRESSED_BYTE if s.compressed else 1) for s in chosen)
    require_memory(min(sample_bytes, int(there)))
    sample = draw(chosen, sample_bytes, seed)
    if not sample:
        raise ShardError(f"{data}: the shards hold no documents to train on")
    content = train(
        (text.decode(errors="ignore") for text in sample), vocab_size, pattern, min_frequency
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, content)
    bpe = load(out)
    if bpe.vocab_size != vocab_size:
        log.warning(
            "the vocabulary has %s entries, not the %s asked for: %s",
            f"{bpe.vocab_size:,}",
            f"{vocab_size:,}",
            "the sample has no more pairs that are frequent enough"
            if bpe.vocab_size < vocab_size
            else "the 256 bytes and end-of-text are always in it",
        )
    facts = {
        "tokenizer": str(out),
        "sha256": bpe.sha256,
        "vocab_size": bpe.vocab_size,
        "sample_documents": len(sample),
        "sample_bytes": sum(map(len, sample)),
    }
    click.echo(json.dumps(facts))


@cli.command()
@data_option
@shards_option
@click.option(
    "--tokenizer", type=path, help="tokenizer.json [default: the one in the folder that holds BINS]"
)
@click.option(
    "--out", type=path, default=BINS, show_default=True, help="The dataset directory, BINS."
)
@click.option("--workers", type=click.IntRange(1), help="Processes [default: one a core]")
@click.option(
    "--encoder",
    type=click.Choice(["auto", "fastokens", "tokenizers"]),
    default="auto",
    show_default=True,
    help="Library; auto takes the fast one while its ids are those of tokenizers.",
)
@click.option(
    "--val",
    default="auto",
    show_default=True,
    metavar="auto|FILE|none",
    help="The validation file; auto takes val.jsonl.zst in DATA.",
)
@click.option(
    "--holdout",
    type=click.FloatRange(0, 1, max_open=True),
    help=f"Share of documents to hold out [default: {DEFAULT_HOLDOUT} without a validation file]",
)
@click.option(
    "--max-reject-share",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Share of a shard's lines that may be no documents.",
)
@click.option("--repair", is_flag=True, help="Mend invalid UTF-8 and lone surrogates with U+FFFD.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "uint16", "uint32"]),
    default="auto",
    show_default=True,
    help="Of the bins; auto goes by the largest id.",
)
@click.option("--eot", help="Token that ends documents [default: <|endoftext|>]")
def tokenize(
    data: Path,
    shards: str,
    tokenizer: Path | None,
    out: Path,
    workers: int | None,
    encoder: EncoderName,
    val: str,
    holdout: float | None,
    max_reject_share: float,
    repair: bool,
    dtype: Literal["auto", "uint16", "uint32"],
    eot: str | None,
) -> None:
    """Turn shards into token bins; what is built already is left alone."""
    for option, share in (("--holdout", holdout), ("--max-reject-share", max_reject_share)):
        if share is not None and math.isnan(share):  # which every range lets through
            raise click.BadParameter("nan is no share", param_hint=option)
    if out.resolve() in (data.resolve(), (data / "train").resolve()):
        raise ShardError(f"--out {out}: the shards are there: name a folder of its own for bins")
    chosen, validation = find_shards(data, shards), choose_validation(data, val)
    if validation and validation.path.resolve() in (shard.path.resolve() for shard in chosen):
        raise ShardError(f"--val {validation.path}: it is to be trained on too: leave it out")
    bpe = load(tokenizer or out.parent / "tokenizer.json", eot)
    if bpe.lossy:
        log.warning("the tokenizer changes text, and the receipts say so: %s", bpe.lossy)
    if holdout is None:
        holdout = 0.0 if validation else DEFAULT_HOLDOUT
    dataset = new_dataset(bpe, choose_dtype(bpe, dtype), holdout, max_reject_share, repair)
    jobs = [Job(shard=shard, split="train", directory=out, dataset=dataset) for shard in chosen]
    if validation:
        jobs.append(Job(shard=validation, split="val", directory=out, dataset=dataset))
    waiting = [job for job in jobs if not is_built(job)]
    log.info("%d of %d shards to build", len(waiting), len(jobs))
    require_space(out, estimate_bytes(waiting))
    create_dataset(out, dataset, bpe.content)
    with Progress(waiting) as progress:
        failures = run_local(waiting, bpe, encoder, workers or _num_cores(), progress)

    receipts: dict[Split, list[Receipt]] = {
        split: [
            read_receipt(output.receipt)
            for job in jobs
            for output in job.outputs
            if output.split == split and output.receipt.exists()
        ]
        for split in SPLITS
    }
    for concern in concerns(receipts["train"], receipts["val"], validation, holdout):
        log.warning("%s", concern)
    _show(receipts)
    if failures:
        log.error(
            "%d of %d shards failed: %s", len(failures), len(jobs), ", ".join(sorted(failures))
        )
        sys.exit(1)


@cli.command()
@click.argument("bins", type=path, default=BINS)
@click.option(
    "--source", type=path, metavar="DATA", help="Hash the shards too: are the bins made from these?"
)
@click.option(
    "--adopt", type=path, metavar="FILE", help="Take in a bare bin, such as nanoGPT's train.bin."
)
@click.option("--tokenizer", type=path, help="Of the bare bin [default: the one in BINS]")
@click.option("--split", type=click.Choice(SPLITS), default="train", show_default=True)
@click.option("--eot", help="Token that ends its documents [default: <|endoftext|>]")
def verify(
    bins: Path,
    source: Path | None,
    adopt: Path | None,
    tokenizer: Path | None,
    split: Split,
    eot: str | None,
) -> None:
    """Read every byte of BINS again and name what is wrong."""
    if adopt:
        bpe = load(tokenizer or bins / "tokenizer.json", eot)
        _show({split: [adopt_bin(bins, split, adopt, bpe)]})
        return
    num_faults = 0
    for fault in chain(faults(bins), source_faults(bins, source) if source else ()):
        log.error("%s", fault)
        num_faults += 1
    for stray in strays(bins):
        log.warning("%s: belongs to no finished bin", stray)
    if num_faults:
        log.error(
            "%s: faults: %d; remove the receipts (.json) of those bins and tokenize again",
            bins,
            num_faults,
        )
        sys.exit(1)
    _show(
        {
            part: [read_receipt(bins / part / f"{shard}.json") for shard in built(bins, part)]
            for part in SPLITS
        }
    )


def _show(receipts: dict[Split, list[Receipt]]) -> None:
    """What bins hold: a table for people, a JSON object a line for programs."""
    for split, of_split in receipts.items():
        if of_split:
            sums = totals(split, of_split)
            if sys.stdout.isatty():
                from rich.console import Console  # a tenth of a second, for people only

                Console().print(table(sums))
            else:
                click.echo(json.dumps(sums, ensure_ascii=False))


def _num_cores() -> int:
    if sys.platform == "linux":  # a batch system may give fewer than there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _ToStderr(logging.Handler):
    """Writes to what stderr is at the moment: while bars are shown, it is above them."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


class _Stopped(SystemExit):
    """Somebody ended the command: an exception, so that no lock and no process is left."""


def _stop(number: int, _: object) -> None:
    raise _Stopped(128 + number)


def main() -> None:
    """Run a command; what is wrong with its input is told in one line."""
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=[_ToStderr()])
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        cli(prog_name="python -m pipeline")
    except _Stopped:
        log.error("stopped: run the same command again to go on")
        raise
    except (ShardError, TokenBinError, TokenizerError, LockedError, OSError, MemoryError) as error:
        log.error("%s", error or "out of memory")
        sys.exit(1)


if __name__ == "__main__":
    main()
