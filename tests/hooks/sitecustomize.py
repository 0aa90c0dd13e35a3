"""What Python runs at its start, where a test puts this folder on PYTHONPATH.

Shards commit after every batch, and batches are small. A process kills itself in front of its
KILL_AT-th operation on the file system, if it is of the kind that KILL_IN names; each operation
leaves a byte in COUNT_IN.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipeline.build

pipeline.build.SECONDS_TO_COMMIT = 0.0
pipeline.build.BATCH_BYTES = 1 << 15

kind = "worker" if "--multiprocessing-fork" in sys.orig_argv else "parent"
count_in = os.environ.get("COUNT_IN")
left = int(os.environ.get("KILL_AT", "0")) if os.environ.get("KILL_IN") == kind else 0


def deadly(operation: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if count_in:
            with (Path(count_in) / kind).open("ab") as file:
                file.write(b".")
        return operation(*arguments, **options)

    return called


for name in ("fsync", "replace", "link", "unlink"):
    setattr(os, name, deadly(getattr(os, name)))
