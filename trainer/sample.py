"""Text from a run's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from model import weights
from model.generate import generate
from pipeline.tokenbin import read_dataset, sha256_of
from trainer import checkpoint as checkpoints


class SampleError(Exception):
    """A run cannot be sampled from."""


def sample(
    run: Path,
    prompt: str,
    *,
    checkpoint: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and its continuation, up to end-of-text or `max_tokens` more tokens.

    An empty prompt starts a document: the model continues an end-of-text.

    Raises:
        CheckpointError: the run has no such checkpoint.
        SampleError: the run has no tokenizer.
    """
    path = run / "tokenizer.json"
    if not path.exists():
        raise SampleError(f"{path}: there is no such file; is {run} a run directory?")
    if sha256_of(path) != read_dataset(run).tokenizer_sha256:
        raise SampleError(f"{path}: not the one that dataset.json beside it names: copy the bins'")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # end-of-text spelled in a prompt is ordinary text
    tokenizer.no_truncation()
    end_of_text = read_dataset(run).end_of_text_id
    model = weights.load(checkpoints.choose(run, checkpoint).model_directory).to(device)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    ids = generate(
        model,
        torch.tensor([prompt_ids or [end_of_text]], device=device),
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_id=end_of_text,
    )
    continuation = [int(next_id) for next_id in ids]
    return tokenizer.decode([*prompt_ids, *continuation], skip_special_tokens=True)
