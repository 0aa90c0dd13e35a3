"""Whether something fits into memory, asked before it is allocated.

The kernel hands out more memory than there is and kills the process that touches it, so a model
that is too large has to be refused by arithmetic.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class NotEnoughMemoryError(Exception):
    """Something is larger than the memory that would have to hold it."""


def require_memory(num_bytes: int, device: torch.device, what: str) -> None:
    """Refuse `what` if its bytes are more than the device can give.

    Raises:
        NotEnoughMemoryError: naming both numbers.
    """
    available = available_bytes(device)
    if num_bytes > available:
        raise NotEnoughMemoryError(
            f"{what} takes {num_bytes / 1e9:,.1f} GB, but {device} has {available / 1e9:,.1f} GB: "
            "make it smaller"
        )


def available_bytes(device: torch.device) -> int:
    """What a CUDA device has free now, or else all the memory that this process may ever have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return min([_physical_bytes(), *_container_bytes()])


def _physical_bytes() -> int:
    if sys.platform == "win32":
        kilobytes = ctypes.c_ulonglong()
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
        return kilobytes.value * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> list[int]:
    limits = [path.read_text().strip() for path in _CONTAINER_LIMITS if path.exists()]
    return [int(limit) for limit in limits if limit.isdigit()]  # "max" is no limit
