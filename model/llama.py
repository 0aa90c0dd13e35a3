"""LLaMA: pre-norm decoder blocks with RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Modules carry Hugging Face's names, so that an export is a renaming: every parameter of LLaMAModel
is one of LlamaForCausalLM with `model.` put before it (`lm_head.weight` stays as it is).

A head of odd size (width 1000 with 8 heads gives 125) cannot be rotated by halves. It is computed
as if padded with one zero to the next even size: the rotary table and the softmax scale are those
of 126, the pad of queries and keys counts once the rotation has filled it, the pad of values and
outputs is dropped. That is exactly a LLaMA with heads of 126 whose q, k and v projections have a
zero row in each head and whose o projection has a zero column.

Shape letters: B windows, T positions, S positions so far (cached and new), C width, H heads,
G key/value heads, K size of a head, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.loss import linear_cross_entropy
from model.memory import require_memory

logger = logging.getLogger(__name__)

Rotary = tuple[Tensor, Tensor]  # cosines and sines of each position's angles, both (T, K/2)


class ModelConfigError(Exception):
    """A configuration that no model can have."""


class ContextLengthError(Exception):
    """More positions than the model has been made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLaMAConfig:
    """The shape of a model, under Hugging Face's names.

    Raises:
        ModelConfigError: a value is of the wrong kind or does not go with another.
    """

    vocab_size: int = 50257
    hidden_size: int = 768
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None  # None becomes num_attention_heads
    num_hidden_layers: int = 12
    max_position_embeddings: int = 1024  # the longest context, in tokens
    intermediate_size: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02  # standard deviation

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for field in fields(self):
            _check_kind(field.name, field.type, getattr(self, field.name))
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise ModelConfigError(
                f"hidden_size {width} cannot be divided among num_attention_heads {heads}: "
                f"take {_around(width, heads)}"
            )
        if heads % self.kv_heads:
            divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            raise ModelConfigError(
                f"num_attention_heads {heads} cannot be divided among num_key_value_heads "
                f"{self.kv_heads}: take one of {', '.join(divisors)}"
            )

    @property
    def kv_heads(self) -> int:
        """`num_key_value_heads`, which is None only until it is filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of a head in the weights."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_head_dim(self) -> int:
        """Size of a head in the computation: the next even number."""
        return self.head_dim + self.head_dim % 2


def num_parameters(config: LLaMAConfig) -> int:
    """How many numbers the model learns, counted without building it."""
    width, kv_width = config.hidden_size, config.kv_heads * config.head_dim
    attention = 2 * width * width + 2 * width * kv_width
    block = attention + 3 * width * config.intermediate_size + 2 * width
    embeddings = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    return embeddings + config.num_hidden_layers * block + width


def model_bytes(config: LLaMAConfig) -> int:
    """Bytes of the weights and the rotary tables in fp32."""
    tables = config.max_position_embeddings * config.padded_head_dim
    return 4 * (num_parameters(config) + tables)


def training_bytes(config: LLaMAConfig) -> int:
    """Bytes of a model in training without its activations: gradients and two moments as well."""
    return model_bytes(config) + 12 * num_parameters(config)


def _check_kind(name: str, kind: object, value: Any) -> None:
    if kind == "bool":
        fits, expected = isinstance(value, bool), "true or false"
    elif kind == "float":
        fits, expected = type(value) in (int, float) and 0 < value < math.inf, "a positive number"
    else:
        fits, expected = type(value) is int and value > 0, "a positive whole number"
    if not fits:
        raise ModelConfigError(f"{name} is {value!r}, expected {expected}")


def _around(size: int, step: int) -> str:
    """The multiples of `step` just below and above `size`, in words."""
    below = size // step * step
    return f"{below} or {below + step}" if below else f"{step}"


@cache  # said once, however many models are built
def _warn_of_odd_heads(width: int, heads: int) -> None:
    head = width // heads
    logger.warning(
        "hidden_size %d with %d heads gives heads of %d: odd, so computed as %d with a zero each, "
        "at a cost in speed; the nearest good hidden_size is %s",
        width,
        heads,
        head,
        head + 1,
        _around(width, heads * (8 if head > 8 else 2)),
    )


# ------------------------------------------------------------------ positions


def rotary_tables(config: LLaMAConfig) -> Rotary:
    """Cosines and sines for every position the model can have; arXiv:2104.09864, equation 15.

    In fp32 and always computed on the CPU, so that every device has the same bits.
    """
    size = config.padded_head_dim
    powers = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, 1.0 / config.rope_theta**powers)
    return angles.cos(), angles.sin()


def rotate(x_BTHK: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (i, i + K/2) of a head by the angles of its position."""
    cos_T1K, sin_T1K = rotary[0][:, None], rotary[1][:, None]
    left, right = x_BTHK.chunk(2, dim=-1)
    turned = torch.cat((left * cos_T1K - right * sin_T1K, right * cos_T1K + left * sin_T1K), dim=-1)
    return turned.to(x_BTHK.dtype)  # the tables are fp32, which wins over autocast's bf16


class LayerCache:
    """The keys and values that one layer has seen, with room for `capacity` positions."""

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = capacity
        self._kv_2BGSK: Tensor | None = None  # shape, dtype and device are those of the first keys

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions; returns the keys and values of all so far, as views."""
        if self._kv_2BGSK is None:
            windows, heads, _, size = k_BGTK.shape
            self._kv_2BGSK = k_BGTK.new_empty(2, windows, heads, self._capacity, size)
        end = self.length + k_BGTK.shape[2]
        self._kv_2BGSK[0, :, :, self.length : end] = k_BGTK
        self._kv_2BGSK[1, :, :, self.length : end] = v_BGTK
        self.length = end
        return self._kv_2BGSK[0, :, :, :end], self._kv_2BGSK[1, :, :, :end]


# ------------------------------------------------------------------ layers


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 whatever comes in; arXiv:1910.07467."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTC: Tensor) -> Tensor:
        weight = self.weight.float()
        return F.rms_norm(x_BTC.float(), weight.shape, weight, self.eps).to(x_BTC.dtype)


class RoPEAttention(nn.Module):
    """Causal attention with rotary positions; H query heads share G key/value heads."""

    def __init__(self, config: LLaMAConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.pad = config.padded_head_dim - config.head_dim
        self.grouped = config.kv_heads != config.num_attention_heads
        width, kv_width = config.hidden_size, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTC: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        q_BTHK, k_BTGK, v_BTGK = (
            projection(x_BTC).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.pad:
            q_BTHK, k_BTGK, v_BTGK = (F.pad(x, (0, self.pad)) for x in (q_BTHK, k_BTGK, v_BTGK))
        q_BHTK = rotate(q_BTHK, rotary).transpose(1, 2)
        k_BGSK = rotate(k_BTGK, rotary).transpose(1, 2)
        v_BGSK = v_BTGK.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSK = cache.extend(k_BGSK, v_BGSK)
        out_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=_causal_mask(q_BHTK, k_BGSK),
            is_causal=q_BHTK.shape[2] == k_BGSK.shape[2],
            enable_gqa=self.grouped,
        )
        return self.o_proj(out_BHTK[..., : self.head_dim].transpose(1, 2).flatten(2))


def _causal_mask(q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor | None:
    """Which keys each query may see, where `is_causal` (same T and S) can't say it."""
    new, seen = q_BHTK.shape[2], k_BGSK.shape[2]
    if new in (1, seen):
        return None
    return torch.ones(new, seen, dtype=torch.bool, device=q_BHTK.device).tril(seen - new)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); arXiv:2002.05202."""

    def __init__(self, config: LLaMAConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))


class LLaMABlock(nn.Module):
    """Attention and SwiGLU, each on the normalised stream and added back to it."""

    def __init__(self, config: LLaMAConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = RoPEAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BTC: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), rotary, cache)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))


# ------------------------------------------------------------------ the model


class LLaMAModel(nn.Module):
    """Token ids to logits, or to the loss.

    Weights are drawn on torch's default device by `generator`, or else by torch's global one. On
    the meta device nothing is allocated but the rotary tables.

    Raises:
        NotEnoughMemoryError: the weights alone are larger than the memory.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LLaMAConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        device = torch.get_default_device()
        if device.type != "meta":
            what = f"a model of {num_parameters(config):,} parameters"
            require_memory(model_bytes(config), device, what)
        if config.head_dim % 2:
            _warn_of_odd_heads(config.hidden_size, config.num_attention_heads)
        self.config = config
        with torch.device("meta"):  # what torch would draw here is thrown away
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(LLaMABlock(config) for _ in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = (
                None
                if config.tie_word_embeddings
                else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            )
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(generator)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew; what writes into the residual stream starts the smaller."""
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0.0, residual_std, generator=generator)
            else:
                weight.normal_(0.0, std, generator=generator)
        for buffer, table in zip((self.cos, self.sin), rotary_tables(self.config), strict=True):
            buffer.copy_(table)

    @property
    def head_weight(self) -> Tensor:
        """The output projection, (V, C): the embeddings themselves if they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(self, ids_BT: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """What the output projection sees, (B, T, C); `cache` holds earlier positions and grows.

        Raises:
            ContextLengthError: more positions than max_position_embeddings.
        """
        start = cache[0].length if cache else 0
        end, longest = start + ids_BT.shape[1], self.config.max_position_embeddings
        if end > longest:
            raise ContextLengthError(
                f"a context of {end} tokens, but the model has max_position_embeddings {longest}: "
                "shorten the context"
            )
        rotary = self.cos[start:end], self.sin[start:end]
        x_BTC = self.embed_tokens(ids_BT)
        for block, layer_cache in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x_BTC = block(x_BTC, rotary, layer_cache)
        return self.norm(x_BTC)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """The logits (B, T, V), or with targets the mean loss over those that are not -100.

        Ids and targets must be below vocab_size; to look would make an accelerator wait.
        """
        x_BTC = self.hidden_states(ids_BT)
        if targets_BT is None:
            return F.linear(x_BTC, self.head_weight)
        return linear_cross_entropy(x_BTC.flatten(0, 1), self.head_weight, targets_BT.flatten())
