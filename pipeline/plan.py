"""What `tokenize` settles before anything is written, and what it has to say when all is done.

A tokenizer whose ids do not fit, a validation file that is not there, too little disk: each is
found here, in the first second and not in the third hour.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pipeline.bpe import BPE, TokenizerError
from pipeline.build import Job
from pipeline.shards import SUFFIXES, Shard, ShardError, find_validation
from pipeline.tokenbin import Dataset, Receipt, TokenBinError

DEFAULT_HOLDOUT = 0.0005  # where there is no validation file
# Of The Pile: its shards hold 2.9 bytes of text a compressed byte, and a vocabulary of 50,000
# makes 0.29 tokens of a byte of text.
TEXT_PER_COMPRESSED_BYTE = 3.0
TOKENS_PER_TEXT_BYTE = 0.3


def choose_validation(data: Path, wanted: str) -> Shard | None:
    """The validation file: `auto` for DATA's own if there is one, `none`, or a path.

    Raises:
        ShardError: the file is not there, or is neither `.jsonl` nor `.jsonl.zst`.
    """
    if wanted == "none":
        return None
    if wanted == "auto":
        return find_validation(data)
    path = Path(wanted)
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        raise ShardError(f"--val {wanted}: expected a {' or '.join(SUFFIXES)} file, auto or none")
    return Shard("val", path)


def choose_dtype(bpe: BPE, wanted: Literal["auto", "uint16", "uint32"]) -> str:
    """The dtype of the bins.

    Raises:
        TokenizerError: the ids do not fit the one that is wanted.
    """
    fits = bpe.vocab_size <= 1 << 16
    if wanted == "auto":
        return "uint16" if fits else "uint32"
    if wanted == "uint16" and not fits:
        raise TokenizerError(
            f"--dtype uint16 ends at 65,535, but the largest id of the tokenizer is "
            f"{bpe.vocab_size - 1:,}: use uint32"
        )
    return wanted


def new_dataset(
    bpe: BPE, dtype: str, holdout: float, max_reject_share: float = 0.01, repair: bool = False
) -> Dataset:
    """What the bins that `bpe` makes have in common."""
    return Dataset(
        tokenizer_sha256=bpe.sha256,
        vocab_size=bpe.vocab_size,
        dtype=dtype,
        end_of_text_token=bpe.end_of_text_token,
        end_of_text_id=bpe.end_of_text_id,
        holdout=holdout,
        max_reject_share=max_reject_share,
        repair=repair,
    )


def estimate_bytes(jobs: Sequence[Job]) -> int:
    """The size of the bins that the jobs will write, about."""
    text = sum(
        job.shard.num_bytes * (TEXT_PER_COMPRESSED_BYTE if job.shard.compressed else 1)
        for job in jobs
    )
    itemsize = jobs[0].dataset.token_dtype.itemsize if jobs else 0
    return int(text * TOKENS_PER_TEXT_BYTE * itemsize)


def require_space(directory: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        TokenBinError: less is free where `directory` is or will be.
    """
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise TokenBinError(
            f"{directory}: the bins need about {num_bytes / 1e9:,.1f} GB ({TOKENS_PER_TEXT_BYTE} "
            f"tokens a byte of text, {TEXT_PER_COMPRESSED_BYTE:g} bytes of text a compressed "
            f"byte), and {free / 1e9:,.1f} GB are free: name another folder with --out"
        )


def concerns(
    train: Sequence[Receipt], val: Sequence[Receipt], validation: Shard | None, holdout: float
) -> Iterator[str]:
    """What the user should know about the bins that are there now, a line each."""
    for receipt in train:
        if not receipt.documents and not holdout:
            yield f"{receipt.shard}: no documents, an empty bin"
    num_documents = sum(receipt.documents for receipt in train)
    num_held_out = sum(receipt.documents for receipt in val if receipt.shard != "val")
    if holdout and num_documents and not num_held_out:
        enough = min(0.5, 10 / num_documents)
        yield (
            f"the hold-out of {holdout:g} takes none of {num_documents:,} documents, so there is "
            f"no validation: --holdout {enough:.1g}, into another folder, would take about 10"
        )
    if validation and not any(receipt.tokens for receipt in val):
        yield f"{validation.path}: no documents, so training goes without validation"
    if not validation and not holdout:
        yield "no validation file and no hold-out: training goes without validation"
