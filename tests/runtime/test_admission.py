"""The memory plan, and where the available memory is read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipfire.base.errors import MemoryLimitError, UnsupportedError, ValidationError
from hipfire.base.types import CacheSpec
from hipfire.cache.kv import kv_mode, kv_nbytes
from hipfire.models.sizes import Sizes
from hipfire.runtime.admission import MemoryPlan, admit, available_memory, fits, plan_memory

SIZES = Sizes(1000, 64, 128, 3, 4, 2, 32, 1e-6, 4096, True)
SPECS = (CacheSpec(2, 32),) * 3


def plan(residency: str, *, mode: str = "bf16", max_seq: int = 512) -> MemoryPlan:
    return plan_memory(
        sizes=SIZES,
        weights=36000,
        specs=SPECS,
        mode=kv_mode(mode),
        slots=1,
        max_seq=max_seq,
        chunk=16,
        residency=residency,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("mode", "per_head"), [("f32", 128), ("bf16", 64), ("q8", 34)])
@pytest.mark.parametrize("layers", [1, 88, 1024])
def test_cache_bytes_equal_the_closed_formula(mode: str, per_head: int, layers: int) -> None:
    specs = (CacheSpec(2, 32),) * layers
    assert kv_nbytes(specs, kv_mode(mode), 3, 100) == 2 * 3 * 100 * layers * 2 * per_head


def test_the_plan_adds_weights_caches_and_room_to_decode() -> None:
    assert plan("decoded").weights == 36000
    assert plan("decoded", mode="q8").caches == 2 * 512 * 3 * 2 * 34
    assert plan("decoded", max_seq=1024).caches == 2 * plan("decoded").caches
    # decoding at every use needs room for the largest matrix
    assert plan("packed").scratch - plan("decoded").scratch == 4 * 1000 * 64


def test_refusal_names_both_numbers_and_a_way_out() -> None:
    small = plan("decoded")
    admit(small, 2 * small.total)
    with pytest.raises(MemoryLimitError, match="MiB are available") as caught:
        admit(small, small.total)
    assert caught.value.required == small.total
    assert "memory.max_seq" in caught.value.hint
    assert not fits(small, small.total)


def test_available_memory_is_bounded_by_the_control_group(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   2048 kB\nSwapFree: 1 kB\n")
    assert available_memory(proc, group) == 2048 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_memory(proc, group) == 2048 * 1024
    (group / "memory.max").write_text("501000\n")
    assert available_memory(proc, group) == 500000
    (group / "memory.stat").write_text("anon 7\ninactive_file 1500\nactive_file 9\n")
    assert available_memory(proc, group) == 500000 + 1500
    (group / "memory.stat").unlink()
    (group / "memory.current").write_text("900000\n")
    assert available_memory(proc, group) == 0


def test_available_memory_without_proc_is_still_a_number(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) > 0


def test_unknown_cache_modes_and_sizes_are_refused() -> None:
    with pytest.raises(ValidationError, match="'fwht4'"):
        kv_mode("fwht4")
    with pytest.raises(UnsupportedError, match="divisible by 32, not 80"):
        kv_nbytes((CacheSpec(1, 80),), kv_mode("q8"), 1, 1)
