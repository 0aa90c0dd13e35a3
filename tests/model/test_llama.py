"""The model against transformers' Llama, and what it refuses."""

from __future__ import annotations

import logging
import math
import shutil

import pytest
import torch
from tiny import distance, random_ids, tiny_config, wide_model
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from model.llama import (
    ContextLengthError,
    LLaMAConfig,
    LLaMAModel,
    ModelConfigError,
    RMSNorm,
    RoPEAttention,
    model_bytes,
    num_parameters,
    rotary_tables,
    rotate,
    training_bytes,
)
from model.memory import NotEnoughMemoryError

REFERENCE = LLaMAConfig(
    vocab_size=100000,
    hidden_size=1000,
    num_attention_heads=8,
    num_hidden_layers=10,
    max_position_embeddings=1024,
    intermediate_size=512,
)


# ------------------------------------------------------------------ against transformers


def padded(name: str, weight: Tensor, config: LLaMAConfig) -> Tensor:
    """A weight as a Llama with even heads has it: a zero row (o: column) in each head."""
    pad = config.padded_head_dim - config.head_dim
    if "o_proj" in name:
        heads = weight.unflatten(1, (-1, config.head_dim))
        return functional.pad(heads, (0, pad)).flatten(1, 2)
    if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
        heads = weight.unflatten(0, (-1, config.head_dim))
        return functional.pad(heads, (0, 0, 0, pad)).flatten(0, 1)
    return weight


def reference_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def reference_model(model: LLaMAModel, rope_theta: float | None = None) -> LlamaForCausalLM:
    """The same weights in transformers' Llama."""
    config = model.config
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            num_hidden_layers=config.num_hidden_layers,
            max_position_embeddings=config.max_position_embeddings,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            head_dim=config.padded_head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta or config.rope_theta},
            attn_implementation="eager",
        )
    )
    weights = {
        reference_name(name): padded(name, weight.detach(), config)
        for name, weight in model.named_parameters()
    }
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return reference


SHAPES = {
    "multi-head": {},
    "grouped": {"num_key_value_heads": 2},
    "one key/value head, theta 500000": {"num_key_value_heads": 1, "rope_theta": 500000.0},
    "tied": {"tie_word_embeddings": True},
    "grouped and tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "odd heads of 7": {"hidden_size": 28},
    "odd heads of 65, grouped": {"hidden_size": 260, "num_key_value_heads": 2},
    "odd heads of 125, as the reference": {"hidden_size": 1000, "num_attention_heads": 8},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_are_those_of_transformers(changes: dict[str, object]) -> None:
    """Otherwise an exported model would write other text than the one that was trained."""
    config = tiny_config(**changes)
    model = wide_model(config, std=0.4 * math.sqrt(32 / config.hidden_size))
    reference = reference_model(model)
    ids = random_ids(config, windows=2, positions=72)
    targets = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)

    expected = reference(input_ids=ids).logits
    assert distance(model(ids), expected) < 1e-5

    loss = model(ids, targets)
    expected_loss = functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    loss.backward()
    expected_loss.backward()
    expected_gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    for name, weight in model.named_parameters():
        found = padded(name, weight.grad, config)
        learns = padded(name, torch.ones_like(weight), config)  # the pad would, in an export
        expected_gradient = expected_gradients[reference_name(name)] * learns
        assert distance(found, expected_gradient) < 1e-5, name


def test_a_wrong_theta_shows_in_the_comparison() -> None:
    """Otherwise the comparison could not tell right positions from wrong ones."""
    model = wide_model(tiny_config())
    ids = random_ids(model.config, windows=2, positions=72)
    wrong = reference_model(model, rope_theta=model.config.rope_theta * 10)
    assert distance(model(ids), wrong(input_ids=ids).logits) > 1e-2


# ------------------------------------------------------------------ positions and causality


@pytest.mark.parametrize("changes", [{}, {"hidden_size": 260}, {"hidden_size": 500}])
def test_attention_depends_on_distance_alone(changes: dict[str, int]) -> None:
    """A naive pairing of an odd head runs, but scores depend on where two tokens stand."""
    config = tiny_config(**changes, max_position_embeddings=600)
    torch.manual_seed(0)
    attention = RoPEAttention(config)
    cos, sin = rotary_tables(config)
    x = torch.randn(1, 24, config.hidden_size)
    here, later, far = (
        attention(x, (cos[offset : offset + 24], sin[offset : offset + 24]))
        for offset in (0, 100, 500)
    )
    torch.testing.assert_close(later, here, rtol=0, atol=1e-5)
    torch.testing.assert_close(far, here, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [520, 1000])
def test_the_score_of_two_positions_depends_on_their_distance_alone(width: int) -> None:
    """H22: heads of 65 and 125 must be as good at position 500 as at position 0."""
    config = tiny_config(hidden_size=width, num_attention_heads=8, max_position_embeddings=600)
    cos, sin = rotary_tables(config)
    torch.manual_seed(0)
    q, k = functional.pad(torch.randn(2, 1, 1, 8, config.head_dim), (0, 1))

    def score(query: int, key: int) -> Tensor:
        turned_q = rotate(q, (cos[query : query + 1], sin[query : query + 1]))
        turned_k = rotate(k, (cos[key : key + 1], sin[key : key + 1]))
        return (turned_q * turned_k).sum(-1)

    for offset in (100, 500):
        torch.testing.assert_close(score(7 + offset, offset), score(7, 0), rtol=0, atol=1e-3)
    assert (score(8, 0) - score(7, 0)).abs().min() > 1e-2


def test_a_later_token_never_changes_earlier_logits() -> None:
    """A leak of the future gives a wonderful loss and a useless model."""
    model = wide_model(tiny_config(num_key_value_heads=2))
    ids = random_ids(model.config, windows=1, positions=40)
    before = model(ids)
    for place in (1, 20, 39):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % model.config.vocab_size
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])


# ------------------------------------------------------------------ precision


def test_rms_norm_is_computed_in_fp32() -> None:
    """In bf16 the mean of squares would keep two digits."""
    torch.manual_seed(0)
    norm = RMSNorm(512, 1e-5).to(torch.bfloat16)
    x = torch.randn(4, 512).to(torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


def test_bf16_autocast_stays_near_fp32_and_keeps_fp32_gradients() -> None:
    """Mixed precision must not turn positions in bf16 or leave gradients in it."""
    model = LLaMAModel(tiny_config(hidden_size=60), torch.Generator().manual_seed(0))
    ids = random_ids(model.config, windows=2, positions=64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
        assert model(ids).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model(ids, ids), rtol=1e-3, atol=0)
    loss.backward()
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}
    assert model.cos.dtype == torch.float32


# ------------------------------------------------------------------ weights


def test_initial_weights_have_the_widths_of_the_recipe() -> None:
    """Residual projections that start too wide make deep models unstable."""
    config = tiny_config(hidden_size=128, num_hidden_layers=8, initializer_range=0.05)
    model = LLaMAModel(config, torch.Generator().manual_seed(0))
    for name, weight in model.state_dict().items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        residual = "o_proj" in name or "down_proj" in name
        expected = 0.05 / math.sqrt(16) if residual else 0.05
        assert abs(float(weight.std()) / expected - 1) < 0.05, name
        assert abs(float(weight.mean())) < expected * 0.05, name


def test_equal_generators_give_equal_models() -> None:
    """A run could not be repeated otherwise."""
    first, second, third = (
        LLaMAModel(tiny_config(), torch.Generator().manual_seed(seed)).state_dict()
        for seed in (3, 3, 4)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], third["embed_tokens.weight"])


def test_the_first_loss_is_that_of_a_guess() -> None:
    """A model that starts far above log(vocabulary) wastes its first steps."""
    config = tiny_config(vocab_size=1000)
    model = LLaMAModel(config, torch.Generator().manual_seed(0))
    ids = random_ids(config, windows=4, positions=64)
    assert model(ids, ids.roll(-1, 1)).item() == pytest.approx(math.log(1000), abs=0.05)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_without_building_the_model(changes: dict[str, object]) -> None:
    """The refusal of sizes that do not fit rests on this number."""
    config = tiny_config(**changes)
    with torch.device("meta"):
        model = LLaMAModel(config)
    assert num_parameters(config) == sum(weight.numel() for weight in model.parameters())
    assert model_bytes(config) == 4 * sum(
        tensor.numel() for tensor in (*model.parameters(), *model.buffers())
    )
    assert training_bytes(config) == model_bytes(config) + 12 * num_parameters(config)


def test_a_tied_model_has_one_embedding_and_learns_it_from_both_ends() -> None:
    """Two copies would drift apart."""
    model = LLaMAModel(tiny_config(tie_word_embeddings=True))
    assert model.head_weight is model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()
    ids = random_ids(model.config, windows=1, positions=8) % 10
    model(ids, ids).backward()
    assert int((model.embed_tokens.weight.grad != 0).any(dim=1).sum()) == 97


def test_rotary_tables_are_no_weights() -> None:
    """A checkpoint with them could not be loaded with a longer context."""
    assert not {"cos", "sin"} & LLaMAModel(tiny_config()).state_dict().keys()


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size 100 .* 3: take 99 or 102"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 3},
            "num_attention_heads 8 .* num_key_value_heads 3: take one of 1, 2, 4, 8",
        ),
        ({"vocab_size": 0}, "vocab_size is 0, expected a positive whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0, expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"initializer_range": "0.02"}, "initializer_range is '0.02'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    """Otherwise it fails on the first batch, in a kernel, without a name."""
    with pytest.raises(ModelConfigError, match=words):
        tiny_config(**changes)


def test_key_value_heads_default_to_the_attention_heads() -> None:
    """Two configurations of one model must be equal."""
    assert tiny_config().num_key_value_heads == 4
    assert tiny_config() == tiny_config(num_key_value_heads=4)


def test_two_key_value_heads_of_eight_train() -> None:
    """H22: width 512 with 8 heads and 2 key/value heads is an ordinary model."""
    config = tiny_config(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    model = LLaMAModel(config)
    ids = random_ids(config, windows=1, positions=16)
    model(ids, ids).backward()
    assert model.layers[0].self_attn.k_proj.weight.grad.shape == (128, 512)


def test_an_odd_head_is_said_once_with_the_nearest_good_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is right but slower: who can still choose the width wants to know."""
    config = tiny_config(hidden_size=520, num_attention_heads=8)
    with caplog.at_level(logging.WARNING):
        LLaMAModel(config)
        LLaMAModel(config)
        LLaMAModel(tiny_config())
    (record,) = caplog.records
    assert "heads of 65" in record.message
    assert "512 or 576" in record.message


def train_one_step(config: LLaMAConfig, positions: int) -> tuple[float, float]:
    model = LLaMAModel(config, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    ids = random_ids(config, windows=1, positions=positions)
    before = model(ids, ids)
    before.backward()
    optimizer.step()
    with torch.no_grad():
        return before.item(), model(ids, ids).item()


def test_heads_of_65_train() -> None:
    """H22: accepted by the configuration, they must not fail on the first batch."""
    before, after = train_one_step(tiny_config(hidden_size=520, num_attention_heads=8), 64)
    assert after < before


@pytest.mark.slow  # 216 million parameters
def test_the_reference_configuration_trains() -> None:
    """H22: width 1000 with 8 heads, vocabulary 100,000."""
    assert REFERENCE.head_dim == 125
    before, after = train_one_step(REFERENCE, 128)
    assert after < before < math.log(100_000) + 0.5


def test_a_context_longer_than_the_tables_is_refused() -> None:
    """Positions without a rotary table have no meaning."""
    model = LLaMAModel(tiny_config(max_position_embeddings=16))
    model(random_ids(model.config, windows=1, positions=16))
    with pytest.raises(ContextLengthError, match=r"17 tokens.*max_position_embeddings 16"):
        model(random_ids(model.config, windows=1, positions=17))


def test_a_model_beyond_the_memory_is_refused_with_both_numbers() -> None:
    """The kernel would kill the process in the middle of drawing the weights."""
    config = tiny_config(vocab_size=10**8, hidden_size=8192)
    with pytest.raises(NotEnoughMemoryError, match=r"[\d,]+ parameters takes 6,55\d\.\d GB, but"):
        LLaMAModel(config)
    assert training_bytes(config) > 4 * 6.5e12


@pytest.mark.slow  # the compiler takes half a minute
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="compiling needs a C++ compiler"
)
def test_the_model_compiles_in_one_graph() -> None:
    """A graph break in the loss would cost on an accelerator what compiling gains."""
    model = wide_model(tiny_config(num_key_value_heads=2), std=0.1)
    ids = random_ids(model.config, windows=2, positions=64)
    expected = model(ids, ids)
    expected.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    found = torch.compile(model, fullgraph=True)(ids, ids)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for name, weight in model.named_parameters():
        assert distance(weight.grad, gradients[name]) < 1e-5, name
