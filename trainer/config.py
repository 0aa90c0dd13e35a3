"""The configuration of a run: TOML in, frozen records out, checked once and then trusted.

`load_config` takes a file and `section.key=value` overrides; what it returns can be written with
`dump_config` and read back equal, so the resolved configuration saved in a run starts it again.
The defaults stand here and nowhere else.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(Exception):
    """A configuration can't be read, or asks for what can't be done."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a value must be besides its type; it stands in the annotation of the field."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Bound("of at least 1", lambda value: value >= 1)]
CountOrZero = Annotated[int, Bound("of at least 0", lambda value: value >= 0)]
Seed = Annotated[int, Bound("from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)]
Positive = Annotated[float, Bound("above 0", lambda value: value > 0)]
Seconds = Annotated[float, Bound("above 0 and at most 1,000,000", lambda value: 0 < value <= 1e6)]
PositiveOrZero = Annotated[float, Bound("of at least 0", lambda value: value >= 0)]
Name = Annotated[str, Bound("that is not empty", lambda value: value != "")]
Ratio = Annotated[float, Bound("from 0 to 1", lambda value: 0 <= value <= 1)]
Beta = Annotated[float, Bound("from 0 to below 1", lambda value: 0 <= value < 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`[model]`: the fields of `model.llama.LLaMAConfig`, which checks how they fit together."""

    vocab_size: Count | None = None  # None: what the bins need
    hidden_size: Count = 768
    num_attention_heads: Count = 12
    num_key_value_heads: Count | None = None  # None: as many as attention heads
    num_hidden_layers: Count = 12
    max_position_embeddings: Count = 1024  # tokens
    intermediate_size: Count = 2048
    rope_theta: Positive = 10_000.0
    rms_norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: Positive = 0.02  # standard deviation

    def llama_fields(self, vocab_size: int) -> dict[str, Any]:
        """Keyword values for `LLaMAConfig`, with nothing left open."""
        key_value_heads = self.num_key_value_heads or self.num_attention_heads
        return {
            **asdict(self),
            "vocab_size": vocab_size,
            "num_key_value_heads": key_value_heads,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`[data]`: what is read, and in which order."""

    bins: Name = "bins/pile"  # the dataset directory
    shards: str = "all"  # 00-29, 00,02,05-07, names, or all
    context: Count = 1024  # tokens that a window predicts
    seed: Seed = 0  # of the order


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """`[batch]`: how many windows at once."""

    global_windows: Count = 512  # per step, over all ranks
    micro_windows: Count = 8  # per rank and forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """`[optim]`: AdamW and its learning rate."""

    peak_lr: Positive = 3e-4
    min_lr_ratio: Ratio = 0.1  # of the peak, at the end
    warmup_steps: CountOrZero = 500  # a short run warms up for a tenth of its steps at most
    schedule: Literal["cosine", "wsd"] = "cosine"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: PositiveOrZero = 0.1  # on matrices except embeddings
    clip: PositiveOrZero = 1.0  # norm of the whole gradient; 0 does not clip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """`[train]`: how long, on what, and how."""

    steps: Count = 10_000
    seed: Seed = 0  # of the initial weights
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU that has it
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on CUDA
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    ngpu: Count | None = None  # ranks on this machine; None: one a GPU, or 1
    timeout_s: Seconds = 600.0  # how long a rank waits for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """`[eval]`: the validation loss."""

    every: Count = 500  # steps
    windows: Count = 256  # at most, spread over the validation split


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """`[checkpoint]`: when one is written and which are kept."""

    every: Count = 500  # steps
    keep_last: Count = 3
    keep_every: Count | None = None  # steps whose checkpoint stays for good; None: none does


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """`[run]`: where the run is and how much it says."""

    directory: Name = "runs/default"  # `load_config` gives runs/<name of the file> if it is not set
    log_every: Count = 10  # steps between two lines on the console


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a run depends on besides its bins."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)


_SECTIONS: dict[str, Any] = get_type_hints(Config)


def micro_steps(batch: BatchConfig, world_size: int) -> int:
    """How many forward passes each rank does in one step.

    Raises:
        ConfigError: the windows of a step cannot be shared equally.
    """
    count, rest = divmod(batch.global_windows, world_size * batch.micro_windows)
    if rest:
        raise ConfigError(
            f"batch.global_windows is {batch.global_windows:,}, which is not a multiple of "
            f"{world_size:,} ranks x batch.micro_windows {batch.micro_windows:,}: change one of "
            f"the three"
        )
    return count


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, with `section.key=value` overrides on top.

    The value of an override is TOML; a bare word is a string.

    Raises:
        ConfigError: something is unknown, of a wrong type or out of range; one line says where.
    """
    chosen: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    chosen["run"]["directory"] = f"runs/{path.stem}"
    for section, table in _read_toml(path).items():
        kinds = _kinds_in(section, str(path))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: found {section} = {_show(table)}, expected [{section}]")
        for key, value in table.items():
            kind = _kind_of(key, kinds, section, str(path))
            chosen[section][key] = _fit(value, kind, f"{path}: {section}.{key}")
    for override in overrides:
        where = f"--set {override}"
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"{where}: expected section.key=value")
        kind = _kind_of(key, _kinds_in(section, where), section, where)
        chosen[section][key] = _fit(_override_value(text.strip(), kind), kind, where)
    config = Config(**{name: record(**chosen[name]) for name, record in _SECTIONS.items()})
    _check_together(config, str(path))
    return config


def dump_config(config: Config) -> str:
    """The TOML text that `load_config` reads back equal; what is None is left out."""
    blocks: list[str] = []
    for section, values in asdict(config).items():
        rows = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{section}]", *rows]) + "\n")
    return "\n".join(blocks)


def _check_together(config: Config, where: str) -> None:
    context, positions = config.data.context, config.model.max_position_embeddings
    if context > positions:
        raise ConfigError(
            f"{where}: data.context is {context:,}, but model.max_position_embeddings is "
            f"{positions:,}: lower the one or raise the other"
        )
    try:
        micro_steps(config.batch, world_size=1)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


# ------------------------------------------------------------------ reading


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _override_value(text: str, kind: Any) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = values.pop("value")
    is_text = bool(values) or (kind is str and not isinstance(value, str))  # data.shards=07 or =7
    return text if is_text else value


def _kinds_in(section: str, where: str) -> dict[str, Any]:
    """The annotated type of each key of a section."""
    if section not in _SECTIONS:
        raise ConfigError(f"{where}: unknown section [{section}]{_hint(section, _SECTIONS)}")
    return get_type_hints(_SECTIONS[section], include_extras=True)


def _kind_of(key: str, kinds: dict[str, Any], section: str, where: str) -> Any:
    if key in kinds:
        return kinds[key]
    homes = [name for name, record in _SECTIONS.items() if key in get_type_hints(record)]
    hint = f": did you mean {homes[0]}.{key}?" if homes else _hint(key, kinds, f"{section}.")
    raise ConfigError(f"{where}: unknown key {section}.{key}{hint}")


def _hint(word: str, known: Iterable[str], prefix: str = "") -> str:
    known = list(known)
    close = get_close_matches(word, known, n=1)
    if close:
        return f": did you mean {prefix}{close[0]}?"
    return f": expected one of {', '.join(known)}"


def _fit(value: Any, kind: Any, where: str) -> Any:
    """The TOML value as the annotated type has it."""
    fitted = _fitted(value, kind)
    if fitted is None:
        raise ConfigError(f"{where}: found {_show(value)}, expected {_words(kind)}")
    return fitted


def _fitted(value: Any, kind: Any) -> Any:
    """The value as `kind`, or None (which TOML cannot say) if it is not one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        fitted = _fitted(value, arguments[0])
        return fitted if fitted is not None and arguments[1].holds(fitted) else None
    if origin in (Union, UnionType):
        return _fitted(value, arguments[0])
    if origin is Literal:
        return value if isinstance(value, str) and value in arguments else None
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            return None
        items = tuple(_fitted(item, kind) for item, kind in zip(value, arguments, strict=True))
        return None if None in items else items
    if kind is float:
        is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
        return float(value) if is_finite else None
    return value if type(value) is kind else None  # a bool is no int


def _words(kind: Any) -> str:
    """What a message calls the values of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_words(arguments[0])} {arguments[1].words}"
    if origin in (Union, UnionType):
        return _words(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(_show(argument) for argument in arguments)
    if origin is tuple:
        return f"[{', '.join(_words(argument) for argument in arguments)}]"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]


# ------------------------------------------------------------------ writing


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _show(value: Any) -> str:
    """A TOML value as a message quotes it."""
    return _toml(value) if isinstance(value, str | bool | int | float) else str(value)
