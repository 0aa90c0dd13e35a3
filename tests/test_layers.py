"""The arrows of docs/DESIGN.md: who may import whom, read from the sources themselves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "model", "trainer")
MAY_IMPORT = {
    "pipeline": ("pipeline",),
    "model": ("model",),
    "trainer": ("trainer", "model", "pipeline.tokenbin"),
}
ARRAYS_ONLY = ("pipeline/tokenbin.py", "trainer/windows.py")  # numpy and the standard library
NOT_NOUNS = {"utils", "util", "common", "base", "types", "helpers", "misc"}


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the full name of everything a module imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def wrong_import(file: str, name: str) -> str | None:
    """Why this file may not import that name, or None if it may."""
    package, top = file.split("/")[0], name.split(".")[0]
    if not top:
        return "relative import"
    if file in ARRAYS_ONLY:
        if top != "numpy" and top not in sys.stdlib_module_names:
            return "this file needs numpy and the standard library only"
        return None
    if package == "pipeline" and top == "torch":
        return "the pipeline runs without torch"
    if top in PACKAGES and not any(is_inside(name, module) for module in MAY_IMPORT[package]):
        return f"{package} may import {', '.join(MAY_IMPORT[package])}"
    outside = not file.startswith("trainer/diagnosis/") and file != "trainer/__main__.py"
    if outside and is_inside(name, "trainer.diagnosis"):
        return "the trainer does not know its diagnosis"
    return None


def violations(root: Path) -> list[str]:
    """Every breach of the layers under `root`, as `file:line: what`."""
    found: list[str] = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), file)
        for line, name in imported(tree):
            if reason := wrong_import(file, name):
                found.append(f"{file}:{line}: imports {name}: {reason}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                found.append(f"{file}:{node.lineno}: assert disappears under python -O")
            if isinstance(node, ast.Import):
                ours = [a.name for a in node.names if a.name.split(".")[0] in PACKAGES]
                found += [f"{file}:{node.lineno}: import {name}: name the thing" for name in ours]
        if path.name == "__init__.py" and (len(tree.body) != 1 or not ast.get_docstring(tree)):
            found.append(f"{file}:1: holds more or less than a docstring")
        if NOT_NOUNS & {part.removesuffix(".py") for part in file.split("/")}:
            found.append(f"{file}:1: find the noun that it is about")
    return found


def test_the_sources_keep_to_the_layers() -> None:
    """The model would need the pipeline, or the pipeline a GPU, and nobody could say since when."""
    assert violations(ROOT) == []


def test_every_package_is_looked_at() -> None:
    """A check that reads no file finds nothing."""
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").is_file()
    for file in ARRAYS_ONLY:
        assert (ROOT / file).is_file()


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("pipeline/build.py", "import torch", "without torch"),
        ("pipeline/build.py", "from torch.nn import Linear", "without torch"),
        ("pipeline/build.py", "def f():\n    from model.llama import x", "may import pipeline"),
        ("pipeline/build.py", "from trainer.windows import x", "may import pipeline"),
        ("pipeline/build.py", "from . import shards", "relative import"),
        ("pipeline/tokenbin.py", "import orjson", "standard library only"),
        ("pipeline/tokenbin.py", "from pipeline.shards import x", "standard library only"),
        ("trainer/windows.py", "import torch", "standard library only"),
        ("model/llama.py", "from pipeline.tokenbin import TokenBins", "may import model"),
        ("model/llama.py", "from trainer.config import Config", "may import model"),
        ("trainer/loop.py", "from pipeline.shards import x", "pipeline.tokenbin"),
        ("trainer/loop.py", "from pipeline import build", "pipeline.tokenbin"),
        ("trainer/loop.py", "from pipeline.tokenbins import x", "pipeline.tokenbin"),
        ("trainer/loop.py", "from trainer.diagnosis.report import x", "its diagnosis"),
        ("trainer/loop.py", "from trainer import diagnosis", "its diagnosis"),
        ("trainer/loop.py", "import model", "name the thing"),
        ("trainer/loop.py", "import pipeline.tokenbin", "name the thing"),
        ("trainer/loop.py", "def f(x):\n    assert x", "python -O"),
        ("trainer/__init__.py", '"""Doc."""\nfrom trainer.loop import train', "a docstring"),
        ("model/__init__.py", "", "a docstring"),
        ("model/utils.py", '"""Doc."""', "find the noun"),
        ("trainer/common/loss.py", '"""Doc."""', "find the noun"),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    """A rule that cannot fail guards nothing."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{file}:")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("pipeline/build.py", "import orjson\nfrom pipeline.tokenbin import BinWriter"),
        ("pipeline/tokenbin.py", "from __future__ import annotations\nimport numpy.typing as npt"),
        ("trainer/loop.py", "import torch\nfrom pipeline.tokenbin import TokenBins"),
        ("trainer/loop.py", "from pipeline import tokenbin\nfrom model.llama import LLaMAModel"),
        ("trainer/__main__.py", "def doctor():\n    from trainer.diagnosis.report import write"),
        ("trainer/diagnosis/report.py", "from trainer.diagnosis.evidence import read"),
        ("trainer/diagnosis/report.py", "from trainer.loop import train"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    """A rule that forbids too much gets switched off."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    assert violations(tmp_path) == []
