"""What all tests share: one thread a process, because tiny models gain nothing from more."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
