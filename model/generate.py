"""Text from a model, a token at a time, with cached keys and values.

Shape letters: B windows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model.llama import LayerCache, LLaMAModel


class SamplingError(Exception):
    """A way of sampling that makes no sense."""


@torch.no_grad()
def generate(
    model: LLaMAModel,
    prompt_BT: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[Tensor]:
    """Continue prompts of one length; yields each window's next id, shape (B,), as it is drawn.

    It ends after `max_new_tokens`, or once every window has drawn `stop_id`; a window that has
    stopped repeats it. When the context is full the older half is dropped and the rest is read
    anew, so later tokens depend on the last max_position_embeddings // 2 tokens at least.

    Args:
        model: on any device; the prompt must be on the same one.
        prompt_BT: at least one token a window, at most max_position_embeddings.
        max_new_tokens: how many to draw at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among that many likeliest tokens.
        top_p: draw among the likeliest tokens that together reach this probability.
        seed: the same seed on the same kind of device draws the same tokens.
        stop_id: the token that ends a text, usually end-of-text.

    Raises:
        SamplingError: an empty prompt or an argument out of range; on the first token drawn.
        ContextLengthError: the prompt is longer than the model's context.
    """
    _check(prompt_BT, max_new_tokens, temperature, top_k, top_p)
    longest = model.config.max_position_embeddings
    capacity = min(longest, prompt_BT.shape[1] + max_new_tokens)
    generator = torch.Generator(device=prompt_BT.device).manual_seed(seed)
    stopped_B = torch.zeros_like(prompt_BT[:, 0], dtype=torch.bool)
    cache = [LayerCache(capacity) for _ in model.layers]
    context_BT = unread_BT = prompt_BT
    for _ in range(max_new_tokens):
        x_BTC = model.hidden_states(unread_BT, cache)
        logits_BV = F.linear(x_BTC[:, -1], model.head_weight)
        ids_B = draw(logits_BV, temperature, top_k, top_p, generator)
        if stop_id is not None:
            ids_B = ids_B.masked_fill(stopped_B, stop_id)
            stopped_B |= ids_B == stop_id
        yield ids_B
        if stop_id is not None and bool(stopped_B.all()):
            return
        unread_BT = ids_B[:, None]
        context_BT = torch.cat((context_BT, unread_BT), dim=1)
        if context_BT.shape[1] > longest:
            context_BT = unread_BT = context_BT[:, -max(longest // 2, 1) :]
            cache = [LayerCache(longest) for _ in model.layers]


def draw(
    logits_BV: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Tensor:
    """One id a row, shape (B,). Ties at the border of top_k stay in.

    Raises:
        SamplingError: a logit is not finite, as in a model that has diverged.
    """
    if not bool(logits_BV.isfinite().all()):
        raise SamplingError("the model's logits are not finite: take an earlier checkpoint")
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None and top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    p_BV = logits_BV.softmax(dim=-1)
    if top_p is not None:
        sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True)
        enough_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= top_p  # without the token itself
        p_BV = torch.zeros_like(p_BV).scatter(1, order_BV, sorted_BV.masked_fill(enough_BV, 0.0))
    return torch.multinomial(p_BV, 1, generator=generator)[:, 0]


def _check(
    prompt_BT: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if prompt_BT.ndim != 2 or not prompt_BT.numel():
        raise SamplingError(f"prompt of shape {tuple(prompt_BT.shape)}, expected windows of tokens")
    if max_new_tokens < 0:
        raise SamplingError(f"max_new_tokens {max_new_tokens}, expected 0 or more")
    if not 0 <= temperature < float("inf"):
        raise SamplingError(f"temperature {temperature}, expected 0 or more")
    if top_k is not None and top_k < 1:
        raise SamplingError(f"top_k {top_k}, expected 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise SamplingError(f"top_p {top_p}, expected more than 0 and at most 1")
