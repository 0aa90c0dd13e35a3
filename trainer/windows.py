"""Which tokens each step reads: a pure function of the step, and its inverse.

A window is `context + 1` tokens of one bin, cut at stride `context` from the epoch's phase, so a
window predicts `context` labels and no label is predicted twice in an epoch. The windows of an
epoch are numbered through the bins; a keyed bijection deals the numbers to positions; step s of the
epoch takes positions [s * global_windows, (s + 1) * global_windows), and each rank its contiguous
share of them. So nothing about order is stored: ranks are disjoint, an epoch covers every window
once, the windows of a step do not depend on the number of ranks, and a run resumes from its step
alone. What an epoch leaves out: the tail of each bin shorter than a window, and its last incomplete
step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEISTEL_ROUNDS = 6
STEPS_PER_FETCH = 64  # a call of `permute` costs milliseconds before its first index


class WindowError(Exception):
    """The bins, the batch and the ranks do not fit together."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Places of some windows, in order; both of shape (windows,)."""

    bin_index: NDArray[np.int64]
    start_token: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bin_index)


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """When the windows that hold a span of tokens are read, in file order; all of shape (windows,).

    A window's rank is `place // (global_windows // world_size)`.
    """

    step: NDArray[np.int64]  # counted over all epochs
    place: NDArray[np.int64]  # inside the step: 0 <= place < global_windows
    start_token: NDArray[np.int64]  # of the window, in the bin


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOrder:
    """The order in which a run reads the windows of its train bins.

    Raises:
        WindowError: the bins have fewer windows than one step needs.
    """

    num_tokens: tuple[int, ...]  # of each bin, in name order
    context: int
    global_windows: int  # per step, over all ranks
    seed: int

    def __post_init__(self) -> None:
        found = int(_count(self.num_tokens, self.context).sum())
        if found < self.global_windows:
            raise WindowError(
                f"the train split has {_tokens_of(self.num_tokens)}: {found:,} windows of "
                f"{self.context + 1:,} tokens (data.context {self.context:,} + 1), but one step "
                f"needs {self.global_windows:,} (batch.global_windows): lower one of them, or give "
                f"more data"
            )

    @property
    def short_bins(self) -> tuple[int, ...]:
        """The bins, by index, that are shorter than a window and so never read."""
        return tuple(i for i, tokens in enumerate(self.num_tokens) if tokens <= self.context)

    def phase(self, epoch: int) -> int:
        """Where in each bin the first window of an epoch starts, in tokens."""
        if epoch == 0:
            return 0
        phase = int(_hashed_words(f"phase {self.seed} {epoch}", 1)[0] % np.uint64(self.context))
        # Tiny bins may lose windows to the phase, but an epoch without a step would never end.
        shifted = int(_count(self.num_tokens, self.context, phase).sum())
        return phase if shifted >= self.global_windows else 0

    def num_windows(self, epoch: int) -> int:
        """The windows there are at this epoch's phase: at most one less a bin than in epoch 0."""
        return int(_count(self.num_tokens, self.context, self.phase(epoch)).sum())

    def steps_in(self, epoch: int) -> int:
        """The steps of an epoch; its last incomplete one is dropped."""
        return self.num_windows(epoch) // self.global_windows

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch that a step belongs to, and its number inside it; all count from 0."""
        if step < 0:
            raise WindowError(f"step {step}: steps count from 0")
        num_epochs = 1  # doubled, so that few tables are ever made
        while (starts := _first_steps(self, num_epochs))[-1] <= step:
            num_epochs *= 2
        epoch = int(np.searchsorted(starts, step, side="right")) - 1
        return epoch, step - int(starts[epoch])

    def windows_for(self, step: int, rank: int = 0, world_size: int = 1) -> Windows:
        """The windows that one rank reads in one step, which counts from 0 over all epochs.

        Raises:
            WindowError: a negative step, a rank outside the world, or a number of ranks that does
                not divide `global_windows`.
        """
        if not 0 <= rank < world_size:
            raise WindowError(f"rank {rank} of {world_size} ranks: expected 0 to {world_size - 1}")
        share, rest = divmod(self.global_windows, world_size)
        if rest:
            raise WindowError(
                f"batch.global_windows {self.global_windows:,} is not divisible by "
                f"{world_size:,} ranks"
            )
        epoch, step_inside = self.epoch_of(step)
        size, fetch_windows = self.num_windows(epoch), STEPS_PER_FETCH * self.global_windows
        fetch, step_inside = divmod(step_inside, STEPS_PER_FETCH)
        first = fetch * fetch_windows
        count = min(fetch_windows, size - first)
        numbers = _numbers_at(first, count, size, self._key(epoch))
        start = step_inside * self.global_windows + rank * share
        return _places(
            numbers[start : start + share], self.num_tokens, self.context, self.phase(epoch)
        )

    def steps_of(self, epoch: int, bin_index: int, first_token: int, end_token: int) -> Readings:
        """When an epoch reads the tokens [first_token, end_token) of a bin: `windows_for` undone.

        A window counts when it holds any token of the span, be it only as its first input, which it
        does not predict. Windows that fell into the dropped step are left out, so the answer may be
        empty.
        """
        phase = self.phase(epoch)
        counts = _count(self.num_tokens, self.context, phase)
        # Window k holds the tokens [phase + k * context, phase + (k + 1) * context + 1).
        first = max(0, -(-(first_token - phase) // self.context) - 1)
        end = min(int(counts[bin_index]), -(-(end_token - phase) // self.context))
        inside = np.arange(first, end if first_token < end_token else first, dtype=np.int64)
        size = int(counts.sum())
        positions = unpermute(inside + int(counts[:bin_index].sum()), size, self._key(epoch))
        step, place = np.divmod(positions, self.global_windows)
        kept = step < size // self.global_windows
        starts = phase + inside * self.context
        epoch_start = _first_steps(self, 1 << epoch.bit_length())[epoch]
        return Readings(epoch_start + step[kept], place[kept], starts[kept])

    def facts(self, bins: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """What the order depends on, by name, as JSON keeps it: equal facts mean an equal order.

        Args:
            bins: the name and the sha256 of each bin, in the order of `num_tokens`.
        """
        return {
            "global_windows": self.global_windows,
            "context": self.context,
            "seed": self.seed,
            "bins": [list(item) for item in bins],
        }

    def _key(self, epoch: int) -> str:
        return f"order {self.seed} {epoch}"  # not their sum: (1, 2) and (2, 1) must differ


def eval_windows(num_tokens: Sequence[int], context: int, limit: int) -> Windows:
    """At most `limit` windows, spread evenly over a validation split, the same at every call.

    An empty split gives none.

    Raises:
        WindowError: the split has tokens, but no bin of it holds a window.
    """
    size = int(_count(num_tokens, context).sum())
    if not size and sum(num_tokens):
        raise WindowError(
            f"the val split has {_tokens_of(num_tokens)}, but none holds a window of "
            f"{context + 1:,} tokens (data.context {context:,} + 1): lower the context, or hold "
            f"out more"
        )
    taken = min(size, limit)
    numbers = np.arange(taken, dtype=np.int64) * size // max(taken, 1)
    return _places(numbers, num_tokens, context, phase=0)


def permute(index: NDArray[np.integer], size: int, key: str) -> NDArray[np.int64]:
    """Send each index below `size` to a different one, in an order that `key` picks.

    A Feistel network permutes the next power of four, and what lands outside `size` is sent on
    until it is inside (cycle walking): less than four times on average. Shape (indices,).
    """
    return _walk(index, size, _hashed_words(key, FEISTEL_ROUNDS), inverse=False)


def unpermute(index: NDArray[np.integer], size: int, key: str) -> NDArray[np.int64]:
    """Undo `permute`: where each index came from."""
    return _walk(index, size, _hashed_words(key, FEISTEL_ROUNDS), inverse=True)


def _walk(
    index: NDArray[np.integer], size: int, keys: NDArray[np.uint64], *, inverse: bool
) -> NDArray[np.int64]:
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    rounds = _undo_rounds if inverse else _rounds
    walked = rounds(index.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(walked >= size)
    while outside.size:
        walked[outside] = rounds(walked[outside], half_bits, keys)
        outside = outside[walked[outside] >= size]
    return walked.astype(np.int64)


def _rounds(
    value: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return left << bits | right


def _undo_rounds(
    value: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for key in keys[::-1]:
        left, right = right ^ (_mix(left, key) & mask), left
    return left << bits | right


def _mix(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014), modulo 2**64."""
    mixed = half ^ key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)


def _hashed_words(text: str, num_words: int) -> NDArray[np.uint64]:
    """Words drawn by hashing, which no version of numpy can change."""
    digest = hashlib.blake2b(text.encode(), digest_size=8 * num_words).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


@lru_cache(maxsize=4)
def _numbers_at(first: int, count: int, size: int, key: str) -> NDArray[np.int64]:
    """The window numbers at positions [first, first + count)."""
    numbers = permute(np.arange(first, first + count, dtype=np.int64), size, key)
    numbers.flags.writeable = False  # the cache hands out this very array
    return numbers


@lru_cache(maxsize=64)
def _first_steps(order: WindowOrder, num_epochs: int) -> NDArray[np.int64]:
    """The first step of each epoch, and of the one that follows; shape (num_epochs + 1,)."""
    steps = [order.steps_in(epoch) for epoch in range(num_epochs)]
    return np.cumsum([0, *steps], dtype=np.int64)


def _count(num_tokens: Sequence[int], context: int, phase: int = 0) -> NDArray[np.int64]:
    """How many windows each bin has from `phase` on; shape (bins,)."""
    return np.maximum(0, (np.asarray(num_tokens, np.int64) - phase - 1) // context)


def _places(
    numbers: NDArray[np.int64], num_tokens: Sequence[int], context: int, phase: int
) -> Windows:
    """Where the windows with these numbers are."""
    ends = np.cumsum(_count(num_tokens, context, phase))
    bin_index = np.searchsorted(ends, numbers, side="right")
    first_numbers = np.concatenate([[0], ends])[bin_index]
    return Windows(bin_index, phase + (numbers - first_numbers) * context)


def _tokens_of(num_tokens: Sequence[int]) -> str:
    plural = "" if len(num_tokens) == 1 else "s"
    return f"{sum(num_tokens):,} tokens in {len(num_tokens):,} bin{plural}"
