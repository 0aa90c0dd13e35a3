"""One writer a bin: a lock file that says which process, on which host, writes since when.

The lock of a process that has died on this host is taken over; a stopped process lives. Whether
one on another host still lives cannot be known, so there its lock stands until somebody removes
the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.tokenbin import write_exclusively


class LockedError(Exception):
    """Another process is writing this bin."""


@contextmanager
def held(path: Path) -> Generator[None]:
    """Hold the lock file `path`, and remove it at the end.

    Raises:
        LockedError: somebody else holds it.
    """
    pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
    owner = {"host": this_host(), "pid": pid, "born": _born(pid), "time": now}
    path.parent.mkdir(parents=True, exist_ok=True)
    while not write_exclusively(path, json.dumps(owner).encode()):
        _clear(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock file: not if there is none, or only a dead owner's."""
    try:
        owner = _owner(path)
    except FileNotFoundError:
        return False
    return owner is None or not _is_dead(owner)


def this_host() -> str:
    """Where process numbers mean what they mean here: a machine, or a container in it."""
    try:
        number = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return platform.node()
    outside = 0xEFFFFFFC  # by Linux's own definition
    return platform.node() if number == outside else f"{platform.node()}, container {number}"


def _clear(path: Path) -> None:
    """Take a dead owner's lock away; somebody else's is left and raises."""
    try:
        with _alone(path.parent):  # of several that find it, none takes the next one's lock
            owner = _owner(path)
            if owner is not None and _is_dead(owner):
                path.unlink()
                return
    except FileNotFoundError:  # given back just now
        return
    if owner is None:
        raise LockedError(f"{path}: not a lock file of ours, or not whole: remove it and run again")
    raise LockedError(
        f"{path}: process {owner['pid']} on {owner['host']} has been at it since {owner['time']}; "
        f"if it is no more, remove this file and run again"
    )


def _owner(path: Path) -> dict[str, Any] | None:
    """What a lock file says; None if it is not ours."""
    try:
        owner = json.loads(path.read_bytes())
    except ValueError:
        return None
    ours = isinstance(owner, dict) and owner.keys() >= {"host", "pid", "time"}
    return owner if ours else None


def _is_dead(owner: dict[str, Any]) -> bool:
    if owner["host"] != this_host():
        return False
    pid, born, found = owner["pid"], owner.get("born"), _born(owner["pid"])
    if born is None or found is None:  # a process of our number can only be an earlier one
        return pid == os.getpid() or not _lives(pid)
    return found != born or not _lives(pid)  # after a restart the numbers come again


if sys.platform == "win32":

    def _lives(pid: int) -> bool:
        query_limited_information, still_active = 0x1000, 259
        kernel = ctypes.windll.kernel32
        handle = kernel.OpenProcess(query_limited_information, False, pid)
        if not handle:
            return False
        code = ctypes.c_ulong()
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        kernel.CloseHandle(handle)
        return code.value == still_active

    def _born(pid: int) -> str | None:
        return None

    @contextmanager
    def _alone(directory: Path) -> Generator[None]:
        kernel = ctypes.windll.kernel32
        mutex = kernel.CreateMutexW(None, False, "piledriver lock files")
        kernel.WaitForSingleObject(mutex, 0xFFFFFFFF)
        try:
            yield
        finally:
            kernel.ReleaseMutex(mutex)
            kernel.CloseHandle(mutex)

else:
    import fcntl

    def _lives(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is somebody else's
            return True
        state = _stat(pid)
        return state is None or state[0] not in "ZX"  # a zombie writes no more

    def _born(pid: int) -> str | None:
        """When a process started, in ticks since the boot; None where the system does not say."""
        state = _stat(pid)
        return state[19] if state else None

    def _stat(pid: int) -> list[str] | None:
        try:
            content = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        return content.rpartition(")")[2].split()

    @contextmanager
    def _alone(directory: Path) -> Generator[None]:
        """Among the processes of this host; where the file system has no such lock, by luck."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
