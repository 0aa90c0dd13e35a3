"""Sampling: the cache against the whole computation, and the ways to draw."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import distance, random_ids, tiny_config, wide_model
from torch import Tensor

from model.generate import SamplingError, draw, generate
from model.llama import ContextLengthError, LayerCache, LLaMAModel

SHAPES: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped and tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "odd heads": {"hidden_size": 28, "num_key_value_heads": 2},
}


def told(model: LLaMAModel, prompt: Tensor, **options: Any) -> Tensor:
    """All new ids, one row a window."""
    return torch.stack(list(generate(model, prompt, **options)), dim=1)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, 39)))
def test_reading_in_pieces_gives_the_states_of_reading_at_once(
    changes: dict[str, Any], cuts: set[int]
) -> None:
    """Otherwise a sample would not be what the model says."""
    model = wide_model(tiny_config(**changes))
    ids = random_ids(model.config, windows=2, positions=40)
    cache = [LayerCache(40) for _ in model.layers]
    places = [0, *sorted(cuts), 40]
    with torch.no_grad():
        pieces = [model.hidden_states(ids[:, start:end], cache) for start, end in pairwise(places)]
        assert distance(torch.cat(pieces, dim=1), model.hidden_states(ids)) < 1e-5


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_temperature_zero_takes_the_likeliest_token(changes: dict[str, Any]) -> None:
    """With the cache as without it, for every window of a batch."""
    model = wide_model(tiny_config(**changes))
    ids = prompt = random_ids(model.config, windows=3, positions=5)
    for _ in range(20):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(told(model, prompt, max_new_tokens=20, temperature=0.0), ids[:, 5:])


def test_a_full_context_drops_its_older_half() -> None:
    """A text longer than the context goes on from what a fresh reading of the rest says."""
    model = wide_model(tiny_config(max_position_embeddings=16))
    ids = prompt = random_ids(model.config, windows=1, positions=10)
    context = prompt
    for _ in range(40):
        if context.shape[1] > 16:
            context = context[:, -8:]
        following = model(context)[:, -1:].argmax(-1)
        ids, context = (torch.cat((old, following), dim=1) for old in (ids, context))
    assert torch.equal(told(model, prompt, max_new_tokens=40, temperature=0.0), ids[:, 10:])


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    """Cutting a prompt in silence would answer another question."""
    model = wide_model(tiny_config(max_position_embeddings=16))
    prompt = random_ids(model.config, windows=1, positions=17)
    assert told(model, prompt[:, 1:], max_new_tokens=3).shape == (1, 3)
    with pytest.raises(ContextLengthError, match="17 tokens"):
        told(model, prompt, max_new_tokens=3)


def test_the_seed_decides_the_text() -> None:
    """A sample in a report must be repeatable, and another seed another sample."""
    model = wide_model(tiny_config(), std=0.1)
    prompt = random_ids(model.config, windows=1, positions=3)
    first, again, other = (
        told(model, prompt, max_new_tokens=20, seed=seed).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_text_ends_at_the_stop_id() -> None:
    """A window that has ended waits, silent, for the others of its batch."""
    model = wide_model(tiny_config())
    prompt = random_ids(model.config, windows=2, positions=4)
    free = told(model, prompt, max_new_tokens=30, temperature=0.0).tolist()
    stop_id = free[0][3]
    stopped = told(model, prompt, max_new_tokens=30, temperature=0.0, stop_id=stop_id).tolist()
    ends = [row.index(stop_id) if stop_id in row else 29 for row in free]
    assert len(stopped[0]) == max(ends) + 1
    for row, expected, end in zip(stopped, free, ends, strict=True):
        assert row[: end + 1] == expected[: end + 1]
        assert set(row[end + 1 :]) <= {stop_id}


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def drawn_ids(**options: Any) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    return {int(draw(LOGITS, generator=generator, **options)) for _ in range(200)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"temperature": 0.01}, {0}),
        ({"temperature": 0.0}, {0}),
    ],
)
def test_only_the_likeliest_tokens_are_drawn(options: dict[str, Any], expected: set[int]) -> None:
    """top_p keeps the token that reaches the probability; top_k counts."""
    assert drawn_ids(**options) == expected


def test_draws_follow_the_probabilities() -> None:
    """Sampling is how a model's distribution is seen."""
    rows = LOGITS.expand(20_000, -1)
    ids = draw(rows, 1.0, None, None, torch.Generator().manual_seed(0))
    shares = torch.bincount(ids, minlength=4) / len(rows)
    torch.testing.assert_close(shares, LOGITS[0].exp(), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_new_tokens": -1},
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    """They would fail deep inside, or draw something else than asked."""
    (name,) = options
    with pytest.raises(SamplingError, match=name):
        told(
            wide_model(tiny_config()), torch.zeros(1, 1).long(), **{"max_new_tokens": 1, **options}
        )


def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to continue."""
    with pytest.raises(SamplingError, match="prompt"):
        told(wide_model(tiny_config()), torch.zeros(1, 0).long(), max_new_tokens=1)


def test_a_diverged_model_is_named_as_one() -> None:
    """Else a run that ended in NaN answers with a traceback from inside torch."""
    model = wide_model(tiny_config())
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(SamplingError, match="not finite"):
            list(generate(model, torch.tensor([[1]]), max_new_tokens=1, temperature=temperature))
