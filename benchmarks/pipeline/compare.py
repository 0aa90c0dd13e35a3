"""How fast `tokenize` is, beside what others use for the same work on the same files.

    python benchmarks/pipeline/compare.py --data DATA --tokenizer gpt2.json > runs.jsonl

The peers are installed from the package index into a virtual environment of their own. All take
turns, so that whatever else the machine does falls on all alike. What counts is the CPU time of a
command and all its processes, from its start to its end. Each run is one JSON object on stdout;
the medians follow on stderr, as a table. Linux and macOS: Windows does not tell what a finished
process took.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from pipeline.shards import ShardReader, find_shards

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
OURS = {  # options of `tokenize`
    "piledriver": (),
    "its reference: --encoder tokenizers": ("--encoder", "tokenizers"),
}
THEIRS = {  # files in peers/
    "nanoGPT-style: datasets, tiktoken": "nanogpt_style.py",
    "tokenizers alone": "plain_tokenizers.py",
    "Megatron-style: pool, tokenizers": "megatron_style.py",
    "datatrove": "datatrove_tokens.py",
}
path = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one command took, with all its processes."""

    tool: str
    workers: int
    tokens: int
    text_mb: float
    cpu_s: float
    wall_s: float
    peak_mb: float  # resident, of the largest of its processes


@click.command()
@click.option("--data", type=path, required=True, help="Folder with *.jsonl.zst.")
@click.option("--tokenizer", type=path, required=True, help="tokenizer.json with GPT-2's pattern.")
@click.option("--repeats", default=5, show_default=True, help="Of each, in turns.")
@click.option(
    "--times", default=1, show_default=True, help="So often is each shard's content in it."
)
@click.option("--workers", multiple=True, default=[1], show_default=True)
@click.option("--only", default="", help="Tools whose names begin so, comma-separated.")
@click.option(
    "--peers",
    type=path,
    default=ROOT / ".venv" / "peers",
    help="Their virtual environment, made if it is not there.",
)
@click.option("--scratch", type=path, help="Folder to work in, instead of the system's.")
def main(
    data: Path,
    tokenizer: Path,
    repeats: int,
    times: int,
    workers: tuple[int, ...],
    only: str,
    peers: Path,
    scratch: Path | None,
) -> None:
    """Measure `tokenize` beside its peers."""
    tools = [tool for tool in (*OURS, *THEIRS) if tool.startswith(tuple(only.split(",")))]
    if THEIRS.keys() & tools:
        install(peers)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        text_mb = lay_out(data, times, Path(folder, "data"))
        for _ in range(repeats):
            for tool in tools:
                for number in workers:
                    with tempfile.TemporaryDirectory(dir=folder) as out:
                        command = command_of(tool, Path(folder, "data"), tokenizer, out, number)
                        if tool in THEIRS:
                            command.insert(0, str(peers / "bin" / "python"))
                        run = measure(command, tool=tool, workers=number, text_mb=text_mb)
                    runs.append(run)
                    click.echo(json.dumps(asdict(run)))
    click.echo(table(runs), err=True)


def install(peers: Path) -> None:
    """Make the peers' virtual environment."""
    if not peers.exists():
        venv.create(peers, with_pip=True)
    requirements = PEERS / "requirements.txt"
    pip = [peers / "bin" / "python", "-m", "pip", "install", "--quiet", "--requirement"]
    subprocess.run([*pip, requirements], check=True)


def lay_out(data: Path, times: int, folder: Path) -> float:
    """Copy the shards, each with its frames so many times: MB of text in all."""
    folder.mkdir()
    text_bytes = 0
    for shard in find_shards(data):
        content = shard.path.read_bytes()
        with (folder / shard.path.name).open("wb") as file:
            file.writelines([content] * times)
        text_bytes += times * sum(sum(batch.text_bytes) for batch in ShardReader(shard))
    return text_bytes / 1e6


def command_of(tool: str, data: Path, tokenizer: Path, out: str, workers: int) -> list[str]:
    """What runs a tool; a peer's lacks the Python in front."""
    if tool in THEIRS:
        return [*map(str, (PEERS / THEIRS[tool], data, tokenizer, out, workers))]
    command = [sys.executable, "-m", "pipeline", "tokenize", "--data", data, "--out", f"{out}/bins"]
    command += ["--tokenizer", tokenizer, "--workers", workers, "--val", "none", "--holdout", 0]
    return [*map(str, command), *OURS[tool]]


def measure(command: Sequence[str], *, tool: str, workers: int, text_mb: float) -> Run:
    """Run a command to its end.

    Raises:
        ClickException: it failed.
    """
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as story:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=story)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - began
        told.seek(0)
        story.seek(0)
        if process.returncode:
            raise click.ClickException(f"{tool}: exit code {process.returncode}\n{story.read()}")
        last = told.read().splitlines()[-1]
    return Run(
        tool=tool,
        workers=workers,
        tokens=json.loads(last)["tokens"] if tool in OURS else int(last),
        text_mb=round(text_mb, 6),
        cpu_s=round(used.ru_utime + used.ru_stime, 3),
        wall_s=round(wall_s, 3),
        peak_mb=round(used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3), 1),
    )


def table(runs: Sequence[Run]) -> str:
    """The medians, in Markdown; the ratio is to the first row."""
    rows = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{runs[0].text_mb:,.1f} MB of text; medians",
        "",
        "| | workers | MB a CPU second | of the first | seconds | peak MB | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    first = 0.0
    for tool, workers in dict.fromkeys((run.tool, run.workers) for run in runs):
        same = [run for run in runs if (run.tool, run.workers) == (tool, workers)]
        speed = median(run.text_mb / run.cpu_s for run in same)
        first = first or speed
        wall, peak = median(run.wall_s for run in same), median(run.peak_mb for run in same)
        rows.append(
            f"| {tool} | {workers} | {speed:.2f} | 1/{first / speed:.1f} | {wall:.1f} "
            f"| {peak:.0f} | {same[0].tokens:,} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
