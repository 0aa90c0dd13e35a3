"""Cross-entropy of a linear layer's outputs without holding those outputs.

With a vocabulary of 100,000 the logits of a batch are by far its largest tensor. Here they exist
for a chunk of rows at a time: the forward pass turns each chunk's logits into their gradient on
the spot and multiplies it out, so that backward only scales two finished gradients.

Shape letters: N rows (tokens), D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # a target that is not predicted

_CHUNK_LOGITS = 2**22  # 16 MiB in fp32: about what the caches of a CPU hold
_CHUNK_LOGITS_ACCELERATOR = 2**26  # 256 MiB: the weight's gradient is re-read for every chunk
_MIN_CHUNK_ROWS = 256  # fewer would leave the matrix products starved


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk_rows: int | None = None
) -> Tensor:
    """The mean over all targets that are not IGNORED of -log softmax(hidden @ weight.T)[target].

    A scalar in fp32 at least, 0 if every target is ignored. Under autocast the matrix products
    run in its dtype; exponentials, sums and the weight's gradient stay in fp32.
    """
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        product_dtype = torch.get_autocast_dtype(device_type)
    else:
        product_dtype = weight_VD.dtype
    if chunk_rows is None:
        chunk_logits = _CHUNK_LOGITS if device_type == "cpu" else _CHUNK_LOGITS_ACCELERATOR
        chunk_rows = max(_MIN_CHUNK_ROWS, chunk_logits // weight_VD.shape[0])
    wants_gradient = torch.is_grad_enabled()
    with torch.autocast(device_type, enabled=False):
        total = _SummedCrossEntropy.apply(
            hidden_ND, weight_VD, targets_N, product_dtype, chunk_rows, wants_gradient
        )
        return total / (targets_N != IGNORED).sum().clamp(min=1)


class _SummedCrossEntropy(torch.autograd.Function):
    """The sum, not the mean: unscaled gradients keep their digits in fp16."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        product_dtype: torch.dtype,
        chunk_rows: int,
        wants_gradient: bool,
    ) -> Tensor:
        sum_dtype = torch.promote_types(product_dtype, torch.float32)
        weight = weight_VD.to(product_dtype)
        total = hidden_ND.new_zeros((), dtype=sum_dtype)
        hidden_gradient = weight_gradient = None
        if wants_gradient and ctx.needs_input_grad[0]:
            hidden_gradient = torch.empty_like(hidden_ND)
        if wants_gradient and ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight, dtype=sum_dtype)

        for start in range(0, len(targets_N), chunk_rows):
            rows = slice(start, start + chunk_rows)
            hidden, targets = hidden_ND[rows].to(product_dtype), targets_N[rows]
            log_p = torch.log_softmax((hidden @ weight.T).to(sum_dtype), dim=-1)
            total += F.nll_loss(log_p, targets, ignore_index=IGNORED, reduction="sum")
            if hidden_gradient is None and weight_gradient is None:
                continue
            counted = (targets != IGNORED).to(product_dtype)[:, None]
            gradient = log_p.exp_()
            gradient.scatter_add_(
                1, targets.clamp(min=0)[:, None], gradient.new_full((len(targets), 1), -1.0)
            )
            gradient = gradient.to(product_dtype)
            if hidden_gradient is not None:
                hidden_gradient[rows] = (gradient @ weight) * counted
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.T, hidden * counted)

        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            hidden_gradient = (hidden_gradient * scale).to(hidden_gradient.dtype)
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None, None


def _add_product(total_VD: Tensor, left_VN: Tensor, right_ND: Tensor) -> None:
    if left_VN.dtype == total_VD.dtype:
        total_VD.addmm_(left_VN, right_ND)
    else:
        total_VD += left_VN @ right_ND
