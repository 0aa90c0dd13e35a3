"""The chunked loss against the plain one, and what it holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.loss import IGNORED, linear_cross_entropy


def drawn(
    rows: int, width: int, vocabulary: int, ignored: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, weights and targets, a share of which is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What the chunks must add up to; 0 where torch gives the mean of nothing."""
    total = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    return total / max(int((targets != IGNORED).sum()), 1)


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * 3.0, inputs)  # a scaled loss, as accumulation has it


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    vocabulary=st.integers(1, 50),
    chunk_rows=st.integers(1, 45),
    ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_chunks_add_up_to_the_plain_cross_entropy(
    rows: int, vocabulary: int, chunk_rows: int, ignored: float, seed: int
) -> None:
    """Otherwise the model would be trained on something else than its loss."""
    hidden, weight, targets = drawn(rows, 8, vocabulary, ignored, seed)
    found = linear_cross_entropy(hidden, weight, targets, chunk_rows)
    expected = plain(hidden, weight, targets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(
        gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_the_derivative() -> None:
    """A finite difference trusts no formula, ours or torch's."""
    hidden, weight, targets = drawn(7, 5, 11, ignored=0.3)
    inputs = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, targets, 3), inputs
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_learns_gets_a_gradient(frozen: str) -> None:
    """A frozen head is ordinary in continued training."""
    hidden, weight, targets = drawn(9, 4, 12)
    inputs = {"hidden": hidden, "weight": weight}
    inputs.pop(frozen).requires_grad_(False)
    (learns,) = inputs.values()
    (found,) = gradients(linear_cross_entropy(hidden, weight, targets, 4), learns)
    (expected,) = gradients(plain(hidden, weight, targets), learns)
    torch.testing.assert_close(found, expected)


def test_no_targets_give_a_loss_of_zero_and_no_gradient() -> None:
    """The mean of nothing is nan in torch, which would end a run."""
    hidden, weight, targets = drawn(6, 4, 10, ignored=1.0)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert float(loss.detach()) == 0.0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


def test_huge_logits_stay_finite() -> None:
    """exp(1000) is not a number; late in a run that goes wrong logits get there."""
    hidden, weight, targets = drawn(8, 4, 10)
    with torch.no_grad():
        hidden *= 1000.0
    loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, plain(hidden, weight, targets))
    assert all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_sums_stay_in_fp32(dtype: torch.dtype) -> None:
    """A loss in bf16 has two digits; gradients in it would stop small updates."""
    hidden, weight, targets = drawn(600, 64, 300, ignored=0.2)
    with torch.no_grad():
        weight *= 0.02
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(hidden, weight, targets, 50)
    assert loss.dtype == torch.float32
    expected = plain(hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    for mine, theirs in zip(
        gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.01 * theirs.norm()


def test_gradients_of_many_rows_do_not_vanish_in_fp16() -> None:
    """Divided by the number of rows first, most of them would be below fp16's smallest number."""
    hidden, weight, targets = drawn(4096, 16, 4000)
    with torch.no_grad():
        weight *= 0.01
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets)
    expected = plain(hidden, weight, targets)
    for mine, theirs in zip(
        gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True
    ):
        assert (mine - theirs).norm() < 0.01 * theirs.norm()


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest result of any operation has."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


@pytest.mark.parametrize("learning", [True, False])
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(learning: bool) -> None:
    """With a vocabulary of 100,000 full logits would be the largest tensor by far."""
    hidden, weight, targets = drawn(512, 4, 1000)
    with LargestTensor() as largest, torch.set_grad_enabled(learning):
        loss = linear_cross_entropy(hidden, weight, targets, 32)
        if learning:
            loss.backward()
    assert largest.num_elements == 32 * 1000


def test_the_default_chunk_stays_moderate() -> None:
    """Who trains gives no chunk size."""
    hidden, weight, targets = drawn(1024, 2, 20_000)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert largest.num_elements <= 256 * 20_000
