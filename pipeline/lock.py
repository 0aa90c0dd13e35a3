"""One writer a bin: a lock file that says which process, on which host, writes since when.

The lock of a process that has died on this host is taken over. Whether one on another host still
lives cannot be known, so there its lock stands until somebody removes the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager
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
    now = datetime.now(UTC).isoformat(timespec="seconds")
    mine = json.dumps({"host": platform.node(), "pid": os.getpid(), "time": now}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    while not write_exclusively(path, mine):
        _clear(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Take a dead owner's lock away; somebody else's is left and raises."""
    try:
        content = path.read_bytes()
        owner: dict[str, Any] = json.loads(content)
        host, pid, time = owner["host"], owner["pid"], owner["time"]
    except FileNotFoundError:  # given back just now
        return
    except (ValueError, KeyError, TypeError):
        raise LockedError(f"{path}: not a lock file of ours: remove it and run again") from None
    if host != platform.node() or (pid != os.getpid() and _lives(pid)):
        raise LockedError(
            f"{path}: process {pid} on {host} has been at it since {time}; "
            f"if it is no more, remove this file and run again"
        )
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)  # of several that found the owner dead, one gets the file
    except FileNotFoundError:
        return
    if (newer := aside.read_bytes()) != content:  # somebody was quicker: this is their new lock
        write_exclusively(path, newer)
    aside.unlink()


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

else:

    def _lives(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is somebody else's
            return True
        state = Path(f"/proc/{pid}/stat")  # on Linux: a zombie writes no more
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] not in "ZX"
