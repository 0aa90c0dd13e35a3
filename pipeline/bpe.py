"""The byte-level BPE: load one, or train one.

Whatever a tokenizer.json says about truncation, padding, templates and dropout is switched off,
and end-of-text written out in a document is ordinary text: a document's tokens are its text and
nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
Pattern = Literal["gpt2", "llama3"]
LLAMA3_PATTERN = (  # of the Llama 3 tokenizer, which has it from tiktoken's cl100k_base
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LARGEST_SAMPLE_BYTES = 10_000_000_000  # the library counts pairs in 32 bits

# Bytes that no UTF-8 text holds; their symbols are the characters of the same number.
_NOT_IN_UTF8 = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
# Texts that normalizers, prefix spaces and clean-ups change.
_PROBE = ("e\u0301", "\ufb01 \uff26", "a\u00a0b", " a , b . c ", "x\r\ny", "\n\n\n", "\x00\u200b")

log = logging.getLogger(__name__)


class TokenizerError(Exception):
    """A tokenizer cannot be used, or cannot be trained as asked."""


# ------------------------------------------------------------------ loading


@dataclass(frozen=True, slots=True, kw_only=True)
class BPE:
    """A tokenizer as it lies on disk, ready to encode documents."""

    tokenizer: Tokenizer
    content: bytes  # of its file
    vocab_size: int  # the largest id, plus 1: ids can have holes, and added tokens count
    end_of_text_token: str
    end_of_text_id: int
    lossy: str  # what its decoding does not give back; empty if it gives back all

    @property
    def sha256(self) -> str:
        """The fingerprint: of the file's bytes."""
        return hashlib.sha256(self.content).hexdigest()


def load(path: Path, end_of_text: str | None = None) -> BPE:
    """The tokenizer in a tokenizer.json.

    Args:
        path: the file.
        end_of_text: the token that ends a document; `<|endoftext|>` if the vocabulary has it.

    Raises:
        TokenizerError: it is not there, not a byte-level BPE, or without an end-of-text.
    """
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_str(content.decode())
    except FileNotFoundError:
        raise TokenizerError(
            f"{path}: there is no such file: train a tokenizer (train-tokenizer), or name one"
        ) from None
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise TokenizerError(f"{path}: not a tokenizer.json ({error})") from None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    _require_byte_level(path, vocabulary)
    vocabulary |= {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
    token = END_OF_TEXT if end_of_text is None else end_of_text
    if token not in vocabulary:
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        raise TokenizerError(
            f"{path}: no token {token} to end documents with: choose one with --eot; "
            f"its special tokens are {', '.join(special) or 'none'}"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    if not isinstance(tokenizer.model, models.BPE):
        raise TokenizerError(f"{path}: a {type(tokenizer.model).__name__} model, expected BPE")
    tokenizer.model.dropout = None
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    # Neither stored in the file nor kept by pickling, and it covers only what is marked special.
    tokenizer.encode_special_tokens = True
    lossy = _lossy(tokenizer)
    if tokenizer.normalizer is None and any(len(_back(tokenizer, t)) < len(t) for t in _PROBE):
        raise TokenizerError(
            f"{path}: it loses text ({lossy}): expected a byte-level pre-tokenizer and decoder"
        )
    return BPE(
        tokenizer=tokenizer,
        content=content,
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text_token=token,
        end_of_text_id=vocabulary[token],
        lossy=lossy,
    )


def token_bytes(bpe: BPE) -> NDArray[np.uint32]:
    """How many bytes of text each id stands for; shape (vocab_size,)."""
    num_bytes = np.zeros(bpe.vocab_size, np.uint32)
    for token, token_id in bpe.tokenizer.get_vocab(with_added_tokens=False).items():
        num_bytes[token_id] = len(token)  # a byte-level token spells each byte as one character
    for token_id, token in bpe.tokenizer.get_added_tokens_decoder().items():
        num_bytes[token_id] = len(token.content.encode())
    return num_bytes


def _require_byte_level(path: Path, vocabulary: dict[str, int]) -> None:
    """A byte without a symbol would vanish from the texts, without an error."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if missing := alphabet - vocabulary.keys() - _NOT_IN_UTF8:
        raise TokenizerError(
            f"{path}: no byte-level BPE with the whole alphabet: {len(missing)} of its symbols for "
            f"bytes are missing (such as {min(missing)!r}), and texts would lose those bytes"
        )


def _lossy(tokenizer: Tokenizer) -> str:
    """What decoding does not give back, told by a few texts that are often changed."""
    for text in _PROBE:
        back = _back(tokenizer, text)
        if back != text:
            normalizer = tokenizer.normalizer
            cause = f" (normalizer {type(normalizer).__name__})" if normalizer else ""
            return f"{text!a} comes back as {back!a}{cause}"
    return ""


def _back(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)


# ------------------------------------------------------------------ training one


def train(
    texts: Iterable[str], vocab_size: int, pattern: Pattern = "gpt2", min_frequency: int = 2
) -> bytes:
    """A tokenizer.json of about `vocab_size` entries, the same for the same texts.

    There are never fewer than the 256 bytes and end-of-text, and a small corpus runs out of
    pairs before it reaches the size: see what `load` says of the result.

    Args:
        texts: documents; their order does not matter.
        vocab_size: end-of-text and the 256 bytes included.
        pattern: how text is cut into the words inside which pairs are merged.
        min_frequency: how often a pair must occur to be merged.
    """
    tokenizer = Tokenizer(models.BPE())
    match pattern:
        case "gpt2":
            cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case "llama3":
            words = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
            symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            cut = pre_tokenizers.Sequence([words, symbols])
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()


def training_memory(sample_bytes: int) -> int:
    """Bytes of memory that drawing and training on a sample takes, about.

    The library's own share was measured at 0.37 GB for 20 MB of text and 0.91 GB for 80 MB.
    """
    return sample_bytes + int(0.37e9 * (sample_bytes / 20e6) ** 0.66)


def require_memory(sample_bytes: int) -> None:
    """Refuse a sample that training cannot hold.

    Raises:
        TokenizerError: it does not fit into memory, or its pairs into the library's counters.
    """
    if sample_bytes > LARGEST_SAMPLE_BYTES:
        raise TokenizerError(
            f"a sample of {sample_bytes:,} bytes: the trainer's 32-bit pair counts overflow above "
            f"{LARGEST_SAMPLE_BYTES:,}: lower --sample-bytes"
        )
    needed, free = training_memory(sample_bytes), _free_memory()
    log.info("training on %s MB needs about %.1f GB", f"{sample_bytes / 1e6:,.0f}", needed / 1e9)
    if free is not None and needed > free:
        raise TokenizerError(
            f"training on {sample_bytes:,} bytes needs about {needed / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free: lower --sample-bytes"
        )


def _free_memory() -> int | None:
    """Bytes that can still be taken, as far as the system tells."""
    free: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        facts = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free.append(int(facts["MemAvailable"].split()[0]) * 1024)
    elif hasattr(os, "sysconf"):
        free.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")  # a container's own limit
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free.append(int(text) - int(used.read_text()))
    return min(free, default=None)
