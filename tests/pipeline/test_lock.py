"""One writer a bin."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from making import ROOT, environment

from pipeline.lock import LockedError, held, is_held, this_host


def lock_of(path: Path, pid: int, host: str | None = None) -> None:
    owner = {"host": host or this_host(), "pid": pid, "time": "2024-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(owner))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "07.lock"


def test_a_lock_names_its_owner_and_goes_with_it(path: Path) -> None:
    """A lock that stays stops the next run."""
    with held(path):
        owner = json.loads(path.read_text())
        assert (owner["host"], owner["pid"]) == (this_host(), os.getpid())
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


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until it is killed."""
    code = "import sys, pathlib, time; from pipeline.lock import held\n"
    code += "with held(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.skipif(os.name == "nt", reason="stops a process by a signal")
def test_a_stopped_owner_lives_and_a_killed_one_does_not(path: Path) -> None:
    """Somebody pressed Ctrl-Z: when he goes on, so does his writer."""
    with hold(path) as owner:
        owner.send_signal(signal.SIGSTOP)
        assert is_held(path)
        with pytest.raises(LockedError, match=f"process {owner.pid} on"), held(path):
            pass
        owner.kill()
        owner.wait()
        assert not is_held(path)
        with held(path):
            assert is_held(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process was born")
def test_a_living_process_of_the_same_number_is_not_the_owner(path: Path) -> None:
    """After a restart the numbers come again, and the lock would stay for ever."""
    lock_of(path, os.getppid())
    owner = json.loads(path.read_text())
    assert is_held(path)
    path.write_text(json.dumps(owner | {"born": "1"}))
    assert not is_held(path)
    with held(path):
        pass


RIVAL = """
import sys, time
from pathlib import Path
from pipeline import lock as locking
from pipeline.lock import LockedError, held
from pipeline.tokenbin import write_exclusively
lock, dead = Path(sys.argv[1], "07.lock"), Path(sys.argv[1], "dead").read_bytes()
judge = locking._is_dead
locking._is_dead = lambda owner: (judge(owner), time.sleep(0.002))[0]  # a slow machine
for _ in range(30):
    write_exclusively(lock, dead)
    try:
        with held(lock):
            lock.with_name("inside").touch(exist_ok=False)
            time.sleep(0.01)
            lock.with_name("inside").unlink()
    except LockedError:
        pass
"""


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be removed there")
def test_rivals_for_a_dead_lock_never_hold_it_together(tmp_path: Path) -> None:
    """Each of several that find the owner dead must not take the next one's lock for his."""
    with hold(tmp_path / "07.lock") as owner:
        owner.kill()
    (tmp_path / "07.lock").rename(tmp_path / "dead")
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(tmp_path)],
            cwd=ROOT,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for rival in rivals:
        _, said = rival.communicate(timeout=60)
        assert said == ""
    (tmp_path / "dead").unlink()
    with held(tmp_path / "07.lock"):
        pass
    assert list(tmp_path.iterdir()) == []
