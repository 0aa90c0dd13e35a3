"""The pages tell the truth: their dumps, their commands, their links and their list of files."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from pipeline.tokenbin import BinPaths, BinWriter, Dataset, Source, create_dataset

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PACKAGES = ("pipeline", "trainer")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


# ------------------------------------------------------------------ docs/token-bins.md


@pytest.fixture
def bin_of_three(tmp_path: Path) -> BinPaths:
    """The bin that docs/token-bins.md shows: documents a, bb, ccc, where byte b has id b."""
    page = read("docs/token-bins.md")
    shown = [json.loads(text) for language, text in FENCED.findall(page) if language == "json"]
    source = next(record["source"] for record in shown if "source" in record)
    dataset = Dataset(
        tokenizer_sha256="44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        vocab_size=257,
        dtype="uint16",
        end_of_text_token="<|endoftext|>",
        end_of_text_id=256,
        holdout=0.0,
        max_reject_share=0.01,
        repair=False,
    )
    create_dataset(tmp_path, dataset, b"{}")
    with BinWriter(tmp_path, "train", "07", dataset) as writer:
        writer.append(
            ids=np.frombuffer(b"abbccc", np.uint8).astype(np.int64),
            lengths=np.array([1, 2, 3]),
            lines=[1, 2, 4],
            text_bytes=[1, 2, 3],
            subsets=["Pile-CC", "FreeLaw", "Pile-CC"],
        )
        writer.finish(Source(**source), "tokenizers", {"tokenizers": "0.23.3"})
    return BinPaths(tmp_path, "train", "07")


def hexdump(content: bytes) -> str:
    """As `hexdump -C` prints it, without its last line."""
    lines: list[str] = []
    for offset in range(0, len(content), 16):
        row = content[offset : offset + 16]
        left, right = row[:8].hex(" "), row[8:].hex(" ")
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{offset:08x}  {left:<23}  {right:<23}  |{text}|")
    return "\n".join(lines) + "\n"


def test_the_dumps_of_the_format_page_are_what_is_written(bin_of_three: BinPaths) -> None:
    """Somebody writes a reader in another language from them."""
    blocks = [text for _, text in FENCED.findall(read("docs/token-bins.md"))]
    assert hexdump(bin_of_three.bin.read_bytes()) in blocks
    assert hexdump(bin_of_three.docs.read_bytes()) in blocks


def test_the_records_of_the_format_page_are_what_is_written(bin_of_three: BinPaths) -> None:
    """A field that the page does not show would be news to every other reader."""
    page = read("docs/token-bins.md")
    shown = [json.loads(text) for language, text in FENCED.findall(page) if language == "json"]
    written = (bin_of_three.receipt, bin_of_three.directory / "dataset.json")
    assert shown == [json.loads(path.read_bytes()) for path in written]


def test_the_table_of_the_format_page_has_the_rows_of_the_index(bin_of_three: BinPaths) -> None:
    """The dump of the index is hard to read without it."""
    rows = np.load(bin_of_three.docs)
    table = [f"| {' | '.join(rows.dtype.names)} |", "|---|---|---|---|---|"]
    table += [f"| {' | '.join(str(value) for value in row.tolist())} |" for row in rows]
    assert "\n".join(table) in read("docs/token-bins.md")


# ------------------------------------------------------------------ commands


def code_lines(text: str) -> Iterator[str]:
    """The lines of the fenced blocks of a page, joined where continued, and its inline code."""
    for _, block in FENCED.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", FENCED.sub("", text))


def wrong_command(line: str) -> str | None:
    """Why a line shows a command that does not exist; None if it shows no such command."""
    for part in re.split(r"&&|[;|]", line.removeprefix("$ ")):
        words = shlex.split(part, comments=True) if re.search(r"\bmake\b| -m ", part) else []
        module = next((i for i in range(1, len(words)) if words[i - 1] == "-m"), None)
        if words[:1] == ["make"]:
            reason = wrong_make(words[1:])
        elif module is not None and words[module] in PACKAGES:
            reason = wrong_click(words[module], words[module + 1 :])
        else:
            continue
        if reason:
            return reason
    return None


def wrong_make(words: list[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
    variables = re.findall(r"^([A-Z_]+) *\?=", MAKEFILE, re.MULTILINE)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets):
            return f"make has no {'variable' if equals else 'target'} {name}"
    return None


def wrong_click(package: str, words: list[str]) -> str | None:
    module = importlib.import_module(f"{package}.__main__")
    group = next(value for value in vars(module).values() if isinstance(value, click.Group))
    if not words:
        return None
    command = group.commands.get(words[0])
    if command is None:
        return f"{package} has no command {words[0]}"
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    for word in words[1:]:
        if word.startswith("--") and word.partition("=")[0] not in known:
            return f"{package} {words[0]} has no option {word}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    """A page that lies about its first command is not read further."""
    wrong = [
        f"`{line.strip()}`: {reason}"
        for line in code_lines(page.read_text(encoding="utf-8"))
        if (reason := wrong_command(line.strip()))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("make fly", "make has no target fly"),
        ("make tokenize SHARD=00-29", "make has no variable SHARD"),
        ("make verify && make fly", "make has no target fly"),
        ("python -m pipeline tokenise", "pipeline has no command tokenise"),
        ("python -m pipeline tokenize --shard 07", "pipeline tokenize has no option --shard"),
        ("torchrun --nproc-per-node 2 -m trainer learn", "trainer has no command learn"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, expected: str) -> None:
    """A check that cannot fail checks nothing."""
    assert wrong_command(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "make",
        "$ make tokenize SHARDS=00-29 BINS=bins/mine  # a night",
        "python -m pipeline verify BINS --adopt train.bin",
        ".venv/bin/python -m trainer train configs/tiny.toml --set train.steps=10",
        "head_dim",
        "BINS/train/07.bin",
    ],
)
def test_a_command_that_exists_is_let_through(line: str) -> None:
    """Or the check would be taken out."""
    assert wrong_command(line) is None


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    """Files move, links do not follow."""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_layout_lists_the_modules_there_are() -> None:
    """It is the map by which a newcomer finds the file to change."""
    section = read("docs/DESIGN.md").partition("## Layout")[2]
    layout = FENCED.search(section)
    assert layout is not None
    listed: set[str] = set()
    package = ""
    for line in layout[2].splitlines():
        if heading := re.match(r"(\w+)/", line):
            package = heading[1]
        listed |= {f"{package}/{name}" for name in re.findall(r"^  (\w+\.py)\b", line)}
    there = {
        path.relative_to(ROOT).as_posix()
        for package in ("pipeline", "model", "trainer")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == there


# ------------------------------------------------------------------ docs/cases.md


def test_every_case_names_a_test_that_exists() -> None:
    """A promise whose test was renamed or removed would stand there unkept."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(sources), re.MULTILINE))
    rows = [row for row in read("docs/cases.md").splitlines() if row.startswith("| H")]
    assert len(rows) >= 24
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, row
