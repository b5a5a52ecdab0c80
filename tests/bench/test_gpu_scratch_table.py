"""The table of scratch slots in the docs against the plans of the models that it is about."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_bench_kit import LaunchedAgain, find_bench
from gpu_random_model import Wanted, request
from hipfire.kernels.gpu.target import INTERPRETED
from hipfire.runtime.gpu_load import plan_load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
# taken where attention is split, which depends on how many processors a device has
SOMETIMES = {"attention_parts", "attention_stats"}


def test_the_table_names_every_slot_of_hybrid_models_and_no_other() -> None:
    section = PAGE.read_text().split("### The slots of a step's scratch")[1].split("\n## ")[0]
    named = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    }
    bench = find_bench("cpu" if INTERPRETED else "gpu", 1)
    machine = bench.machine(LaunchedAgain().capture)
    planned = set()
    for shape in ("qwen3.6-27b", "qwen3.6-35b-a3b"):
        plan = plan_load(request(Wanted(shape, "mq4", slots=2, chunk=512, max_seq=512)), machine)
        assert plan.memory.states > 0
        planned |= {slot.name for slot in plan.scratch}
    assert planned - named == set()
    assert named - planned <= SOMETIMES
