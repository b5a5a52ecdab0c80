"""The program of a process that holds a part of a model: `python -m hipfire.runtime.parallel_worker`.

It reads its task, one line of JSON, loads its part and says that it is ready; then it follows what the first
process sends, until that says stop or is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hipfire.base.errors import HipfireError
from hipfire.device.collective import join
from hipfire.runtime.load import load_shard
from hipfire.runtime.parallel import follow, options_from, part_options
from hipfire.runtime.parallel_messages import Stop, read
from hipfire.runtime.parallel_weights import Shard
from hipfire.runtime.runner import Runner
from hipfire.runtime.shard import Part

Close = Callable[[], None]
# loads a part for a task, and returns its runner and what gives its memory back
Load = Callable[[Mapping[str, Any], Shard, torch.device], tuple[Runner, Close]]


def load_part(task: Mapping[str, Any], shard: Shard, device: torch.device) -> tuple[Runner, Close]:
    """Load this process's part of the model at the task's path."""
    loaded = load_shard(Path(task["path"]), part_options(options_from(task["options"]), device), shard)
    return loaded.runner, loaded.close


def work(load: Load = load_part) -> int:
    """Do what the first process wants, which is at the other end of stdin; returns the exit status."""
    orders = sys.stdin.buffer
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # what libraries print must not get between reports
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def report(facts: Mapping[str, Any]) -> None:
        print(json.dumps(facts), file=reports)

    try:
        _serve(json.loads(orders.readline()), orders, load, report)
    except Exception as error:
        line = error.line() if isinstance(error, HipfireError) else f"{type(error).__name__}: {error}"
        # whoever started this process may be gone
        with suppress(BrokenPipeError):
            report({"error": line})
        return 1
    return 0


def _end_with_parent(parent: int) -> None:
    """End this process once the first one is gone, even if it waits for that one on a GPU."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(
    task: Mapping[str, Any], orders: BinaryIO, load: Load, report: Callable[[Mapping[str, Any]], None]
) -> None:
    rank, size, device = task["rank"], task["size"], torch.device(task["device"])
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    report({"started": True})
    group = join(Path(task["folder"]), rank, size, device, direct=task["direct"])
    runner, close = load(task, Shard(Part(rank, size), group), device)
    report({"ready": True})
    while not isinstance(message := read(orders), Stop):
        follow(runner, message)
    close()
    group.close()


if __name__ == "__main__":
    sys.exit(work())
