"""One writer a bin."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.lock import LockedError, held


def lock_of(path: Path, pid: int, host: str | None = None) -> None:
    owner = {"host": host or platform.node(), "pid": pid, "time": "2024-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(owner))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "07.lock"


def test_a_lock_names_its_owner_and_goes_with_it(path: Path) -> None:
    """A lock that stays stops the next run."""
    with held(path):
        owner = json.loads(path.read_text())
        assert (owner["host"], owner["pid"]) == (platform.node(), os.getpid())
    assert list(path.parent.iterdir()) == []
    with pytest.raises(RuntimeError, match="in between"), held(path):
        raise RuntimeError("in between")
    assert list(path.parent.iterdir()) == []


def test_a_living_owner_keeps_its_lock(path: Path) -> None:
    """Two writers of one bin would mix their bytes."""
    lock_of(path, os.getppid())
    with pytest.raises(LockedError, match=rf"07\.lock: process {os.getppid()} on"), held(path):
        pass
    lock_of(path, 1, host="elsewhere")
    with pytest.raises(LockedError, match=r"on elsewhere .* remove this file"), held(path):
        pass
    assert path.exists()


def test_a_dead_owner_loses_its_lock(path: Path) -> None:
    """A killed run must not need a person to clean up after it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    lock_of(path, process.pid)
    with held(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a zombie")
def test_a_zombie_is_dead_too(path: Path) -> None:
    """In many containers nobody reaps the workers of a run that was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    lock_of(path, process.pid)
    with held(path):
        pass
    process.wait()


def test_a_lock_of_the_same_number_in_an_earlier_life_is_taken(path: Path) -> None:
    """In a restarted container the process has the number of the one that was killed."""
    lock_of(path, os.getpid())
    with held(path):
        pass


def test_something_else_is_left_alone(path: Path) -> None:
    """It may be somebody's."""
    path.write_text("mine")
    with pytest.raises(LockedError, match="not a lock file"), held(path):
        pass
    assert path.read_text() == "mine"
