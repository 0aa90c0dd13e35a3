"""Configurations: what is read, what is refused and what the message says."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.llama import LLaMAConfig
from trainer.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    dump_config,
    load_config,
    micro_steps,
)

CONFIGS = Path(__file__).parents[2] / "configs"
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
RATIO = st.floats(0, 1)
COUNT = st.integers(1, 2**63)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Configurations that are in range, with every key set or left open."""
    context, micro_windows = draw(st.integers(1, 2**20)), draw(st.integers(1, 64))
    model = st.builds(
        ModelConfig,
        vocab_size=st.none() | COUNT,
        num_key_value_heads=st.none() | COUNT,
        max_position_embeddings=st.integers(context, 2**21),
        rope_theta=POSITIVE,
        tie_word_embeddings=st.booleans(),
    )
    optim = st.builds(
        OptimConfig,
        peak_lr=POSITIVE,
        min_lr_ratio=RATIO,
        schedule=st.sampled_from(["cosine", "wsd"]),
        betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    )
    return Config(
        model=draw(model),
        data=DataConfig(bins=draw(TEXT), shards=draw(TEXT), context=context),
        batch=BatchConfig(
            micro_windows=micro_windows,
            global_windows=micro_windows * draw(st.integers(1, 100)),
        ),
        optim=draw(optim),
        train=draw(
            st.builds(
                TrainConfig, steps=COUNT, ngpu=st.none() | COUNT, timeout_s=st.floats(1e-3, 1e6)
            )
        ),
        eval=draw(st.builds(EvalConfig, every=COUNT)),
        checkpoint=draw(st.builds(CheckpointConfig, keep_every=st.none() | COUNT)),
        run=RunConfig(directory=draw(TEXT)),
    )


def written(directory: Path, text: str) -> Path:
    path = directory / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(directory: Path, text: str, *overrides: str) -> str:
    """The message about a configuration that must be refused: always one line."""
    with pytest.raises(ConfigError) as error:
        load_config(written(directory, text), overrides)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(directory / "mine.toml"), "mine.toml")


# ------------------------------------------------------------------ what is read


@given(config=configs())
@settings(max_examples=50, deadline=None)
def test_a_dumped_configuration_reads_back_equal(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The configuration saved in a run would otherwise start another run."""
    path = written(tmp_path_factory.getbasetemp(), dump_config(config))
    assert load_config(path) == config


def test_an_empty_file_gives_the_defaults_and_a_run_named_like_it(tmp_path: Path) -> None:
    """Two configurations must not share a run by default."""
    directory = RunConfig(directory="runs/mine")
    assert load_config(written(tmp_path, "")) == replace(Config(), run=directory)


def test_every_section_and_key_is_read(tmp_path: Path) -> None:
    """A key that is accepted and then ignored is worse than one that is refused."""
    text = """
        [model]
        hidden_size = 64
        tie_word_embeddings = true
        [data]
        bins = "bins/mine"
        context = 128
        [optim]
        betas = [0.8, 0.9]
        clip = 2
        schedule = "wsd"
        [train]
        compile = "off"
        ngpu = 2
    """
    config = load_config(written(tmp_path, text))
    assert config.model == ModelConfig(hidden_size=64, tie_word_embeddings=True)
    assert config.data == DataConfig(bins="bins/mine", context=128)
    assert config.optim == OptimConfig(betas=(0.8, 0.9), clip=2.0, schedule="wsd")
    assert isinstance(config.optim.clip, float)
    assert config.train == TrainConfig(compile="off", ngpu=2)


def test_overrides_stand_above_the_file_and_the_last_one_counts(tmp_path: Path) -> None:
    """`--set` is how a remedy or a make variable reaches a run."""
    path = written(tmp_path, "[train]\nsteps = 5\n[optim]\npeak_lr = 1e-3")
    config = load_config(
        path,
        ["train.steps=6", "train.steps = 7", "optim.betas=[0.5, 0.6]", "train.device=cpu"],
    )
    assert (config.train.steps, config.train.device) == (7, "cpu")
    assert (config.optim.betas, config.optim.peak_lr) == ((0.5, 0.6), 1e-3)


@pytest.mark.parametrize(
    "text", ["07", "7", "00-29", "00,02,05-07", "all", "true", "2026-12-01", "7\nseed = 3"]
)
def test_an_override_of_a_string_is_taken_as_typed(tmp_path: Path, text: str) -> None:
    """`--set data.shards=7` names a shard, although TOML reads a number."""
    assert load_config(written(tmp_path, ""), [f"data.shards={text}"]).data.shards == text


def test_a_quoted_override_and_a_windows_path_are_strings(tmp_path: Path) -> None:
    """Both ways of writing are natural in a shell."""
    overrides = ['data.shards="00-03"', r"data.bins=C:\bins\new"]
    data = load_config(written(tmp_path, ""), overrides).data
    assert (data.shards, data.bins) == ("00-03", r"C:\bins\new")


def test_a_file_from_a_windows_editor_is_read(tmp_path: Path) -> None:
    """A byte-order mark and CRLF are invisible to the one who wrote them."""
    path = tmp_path / "notepad.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_config(path).train.steps == 3


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_example_configurations_are_valid_and_shared_by_two_ranks(path: Path) -> None:
    """They are what a newcomer starts with."""
    config = load_config(path)
    assert config.run.directory == f"runs/{path.stem}"
    assert config.model.hidden_size % config.model.num_attention_heads == 0
    assert micro_steps(config.batch, world_size=2) >= 1


# ------------------------------------------------------------------ what is refused


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """A misspelt key would leave its default in force for weeks."""
    message = refusal(tmp_path, "[optim]\npeak_rl = 1e-3")
    assert message == "mine.toml: unknown key optim.peak_rl: did you mean optim.peak_lr?"


def test_a_key_of_another_section_is_sent_there(tmp_path: Path) -> None:
    """The name alone is easy to remember, the section is not."""
    message = refusal(tmp_path, "[train]\nglobal_windows = 8")
    assert message.endswith("unknown key train.global_windows: did you mean batch.global_windows?")


def test_an_unknown_key_like_no_other_gets_the_list(tmp_path: Path) -> None:
    """Then the reader wants to know what there is."""
    message = refusal(tmp_path, "[run]\nzzz = 8")
    assert message.endswith("unknown key run.zzz: expected one of directory, log_every")


@pytest.mark.parametrize("text", ["[optimizer]", "[optimizer]\npeak_lr = 1"])
def test_an_unknown_section_is_refused_with_the_nearest_one(tmp_path: Path, text: str) -> None:
    """Even an empty one: what its author meant to put there is missing somewhere."""
    message = refusal(tmp_path, text)
    assert message == "mine.toml: unknown section [optimizer]: did you mean optim?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nsteps = true", "train.steps: found true, expected a whole number of at least 1"),
        ("[train]\nsteps = 1.0", "train.steps: found 1.0, expected a whole number of at least 1"),
        ("[train]\nsteps = 0", "train.steps: found 0, expected a whole number of at least 1"),
        ("[train]\nngpu = 0", "train.ngpu: found 0, expected a whole number of at least 1"),
        ("[train]\nseed = -1", "train.seed: found -1, expected a whole number from 0 to 2**63 - 1"),
        ('[optim]\nclip = "1"', 'optim.clip: found "1", expected a number of at least 0'),
        ("[optim]\nclip = true", "optim.clip: found true, expected a number of at least 0"),
        ("[optim]\npeak_lr = nan", "optim.peak_lr: found nan, expected a number above 0"),
        ("[optim]\npeak_lr = inf", "optim.peak_lr: found inf, expected a number above 0"),
        ("[optim]\neps = 0", "optim.eps: found 0, expected a number above 0"),
        (
            "[optim]\nmin_lr_ratio = 1.1",
            "optim.min_lr_ratio: found 1.1, expected a number from 0 to 1",
        ),
        (
            "[optim]\nbetas = [0.9, 1]",
            "optim.betas: found [0.9, 1], expected "
            "[a number from 0 to below 1, a number from 0 to below 1]",
        ),
        (
            "[optim]\nbetas = [0.9]",
            "optim.betas: found [0.9], expected "
            "[a number from 0 to below 1, a number from 0 to below 1]",
        ),
        (
            "[model]\ntie_word_embeddings = 1",
            "model.tie_word_embeddings: found 1, expected true or false",
        ),
        ("[data]\nshards = 7", "data.shards: found 7, expected a string"),
        (
            "[train]\nprecision = 16",
            'train.precision: found 16, expected one of "auto", "fp32", "bf16"',
        ),
        (
            '[optim]\nschedule = "linear"',
            'optim.schedule: found "linear", expected one of "cosine", "wsd"',
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_found_and_expected(
    tmp_path: Path, text: str, expected: str
) -> None:
    """Python would take True for one step, and NaN passes most comparisons."""
    assert refusal(tmp_path, text) == f"mine.toml: {expected}"


def test_a_key_outside_any_section_is_refused(tmp_path: Path) -> None:
    """`train = 3` is a slip of somebody who knows other tools."""
    assert refusal(tmp_path, "train = 3") == "mine.toml: found train = 3, expected [train]"


def test_bad_toml_is_one_line_with_file_and_line(tmp_path: Path) -> None:
    """A traceback from a parser tells a user nothing."""
    message = refusal(tmp_path, "[train]\nsteps 3")
    assert message.startswith("mine.toml: not TOML: ")
    assert "line 2" in message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """Such as a checkpoint given by mistake."""
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The commonest mistake of all."""
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "expected section.key=value"),
        ("steps=3", "expected section.key=value"),
        ("train.step=3", "unknown key train.step: did you mean train.steps?"),
        ("trian.steps=3", "unknown section [trian]: did you mean train?"),
        ("train.steps=many", 'found "many", expected a whole number of at least 1'),
        ("train.compile=true", 'found true, expected one of "auto", "on", "off"'),
    ],
)
def test_a_bad_override_is_refused_and_quoted(tmp_path: Path, override: str, expected: str) -> None:
    """It stands in a long command line, so the message repeats it."""
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, ""), [override])
    assert str(error.value).startswith(f"--set {override}: ")
    assert expected in str(error.value)


def test_a_context_beyond_the_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """The rotary table ends there, which would show as a shape error in the first batch."""
    message = refusal(tmp_path, "[data]\ncontext = 4096")
    assert "data.context is 4,096" in message
    assert "model.max_position_embeddings is 1,024" in message


def test_micro_windows_must_divide_the_batch(tmp_path: Path) -> None:
    """H19: a rounded count of micro-steps trains on another batch than the one asked for."""
    message = refusal(tmp_path, "[batch]\nglobal_windows = 10\nmicro_windows = 4")
    assert message.startswith("mine.toml: batch.global_windows is 10")
    assert "batch.micro_windows 4" in message


# ------------------------------------------------------------------ what follows from it


def test_micro_steps_are_shared_by_the_ranks() -> None:
    """H19: 40 micro-steps on 4 ranks are 10 each, not 40 each."""
    assert micro_steps(BatchConfig(global_windows=40, micro_windows=1), world_size=4) == 10
    assert micro_steps(BatchConfig(global_windows=64, micro_windows=8), world_size=2) == 4


@pytest.mark.parametrize(("global_windows", "world_size"), [(40, 3), (2, 4)])
def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(
    global_windows: int, world_size: int
) -> None:
    """H19: it was divided by the wrong number, or to 0."""
    batch = BatchConfig(global_windows=global_windows, micro_windows=1)
    with pytest.raises(ConfigError, match=f"is {global_windows}, .* {world_size} ranks"):
        micro_steps(batch, world_size)


def test_the_model_fields_leave_nothing_open() -> None:
    """The vocabulary comes from the bins, and key/value heads default to the attention heads."""
    values = ModelConfig(num_attention_heads=6).llama_fields(vocab_size=300)
    assert values.keys() == {field.name for field in fields(ModelConfig)}
    assert (values["vocab_size"], values["num_key_value_heads"]) == (300, 6)
    assert ModelConfig(num_key_value_heads=2).llama_fields(10)["num_key_value_heads"] == 2


def test_the_model_section_is_the_models_own_configuration() -> None:
    """A field or a default that stands in two places would drift apart."""
    ours = ModelConfig().llama_fields(LLaMAConfig().vocab_size)
    assert LLaMAConfig(**ours) == LLaMAConfig()
    assert ours.keys() == {field.name for field in fields(LLaMAConfig)}


@pytest.mark.parametrize(
    "override",
    ["data.seed=9223372036854775808", "train.seed=-1", "train.timeout_s=1e300", "run.directory=''"],
)
def test_what_no_machine_can_take_is_refused_here(tmp_path: Path, override: str) -> None:
    """Else it is a traceback from inside a library, after the bins have been opened."""
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"expected a "):
        load_config(path, [override])
