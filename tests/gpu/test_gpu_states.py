"""The memory of recurrent states on a GPU: planned, taken with the rest of a load, shown, and given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from gpu_model_kit import DEVICE, SLOTS, load, machine, request

from hipfire.base.errors import MemoryLimitError
from hipfire.base.qtypes import QType
from hipfire.base.types import StateSpec
from hipfire.cache.states import state_nbytes
from hipfire.device.injection import injection_table
from hipfire.device.platform import Gpu
from hipfire.device.pool import Block, Pool, device_pool
from hipfire.models.family import ModelConfig
from hipfire.runtime import gpu_load
from hipfire.runtime.admission import MemoryPlan
from hipfire.runtime.gpu_load import GpuModel, Request, build, plan_load

SPECS = (StateSpec(96, 4, 1, 2, 16, 32), StateSpec(96, 4, 1, 2, 16, 32))


class Recurrent:
    """The configuration of a model to which recurrent layers were added."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def state_specs(self) -> tuple[StateSpec, ...]:
        return SPECS


def recurrent(**options: Any) -> Request:
    """Return a request whose model also has states."""
    wanted = request("llama", QType.HFQ4G128, **options)
    return replace(wanted, config=cast(ModelConfig, Recurrent(wanted.config)))


class Passing:
    """A pool whose blocks come from a given function, and that keeps what comes back."""

    def __init__(self, pool: Pool, take: Callable[[int], Block]) -> None:
        self.take, self.counters = take, pool.counters

    def drain(self) -> int:
        return 0


class Loaded:
    """A load as an owner."""

    def __init__(self, model: GpuModel) -> None:
        self.release = model.close


def test_states_are_planned_taken_zeroed_and_given_back() -> None:
    wanted, without = recurrent(backend="legacy"), request("llama", QType.HFQ4G128, backend="legacy")
    nbytes = SLOTS * state_nbytes(SPECS)
    plan, less = plan_load(wanted, machine()).memory, plan_load(without, machine()).memory
    assert (plan.states, less.states) == (nbytes, 0)
    assert plan.total == less.total + nbytes
    pool = device_pool(DEVICE)
    other = load(without, pool)
    assert other.runner.cache.states is None
    held = other.held()
    other.close()
    model = load(wanted, pool)
    states = model.runner.cache.states
    assert states is not None
    assert states.nbytes == nbytes
    assert states.tail(1).device.type == DEVICE.type
    assert all(bool((view == 0).all()) for slot in range(SLOTS) for _, view in states.views(slot))
    assert model.held() == held + nbytes
    model.close()
    assert pool.counters().live_bytes == 0


@pytest.mark.parametrize("kind", ["added", "qwen3_5"])
def test_each_allocation_of_a_load_with_states_may_fail_and_nothing_is_lost(kind: str) -> None:
    pool = device_pool(DEVICE)
    if kind == "added":
        wanted = recurrent(backend="legacy")
    else:
        wanted = request(kind, QType.HFQ4G128, backend="legacy")
    plan = plan_load(wanted, machine())

    def construct(take: Callable[[int], Block]) -> Loaded:
        on = replace(machine(), pool=cast(Pool, Passing(pool, take)))
        return Loaded(build(wanted, on, plan))

    rows = injection_table("load with states", pool, construct)
    # weights, caches, states, and the slots of the scratch
    assert len(rows) > len(plan.scratch) + 2
    assert [row.failed_at for row in rows if not row.passed] == []


def test_a_load_whose_states_do_not_fit_is_refused_with_both_numbers() -> None:
    gpu = cast(Gpu, replace(machine()))
    plan = MemoryPlan(weights=1 << 20, caches=2 << 20, scratch=4 << 20, states=8 << 20)
    with pytest.raises(MemoryLimitError, match="8 MiB states") as caught:
        gpu_load._admit(plan, gpu, 10 << 20)
    assert (caught.value.required, caught.value.available) == (15 << 20, int((10 << 20) * gpu_load.USABLE))
    gpu_load._admit(plan, gpu, 16 << 20)


def test_a_rehearsal_knows_the_shapes_of_states() -> None:
    seen: list[tuple[torch.Size, str]] = []
    wanted = recurrent()
    build_model = wanted.family.build

    def watched(config: Any, source: Any) -> Any:
        model = build_model(config, source)

        class Watching:
            vocab_size = model.vocab_size
            logits = model.logits

            def __call__(self, tokens: torch.Tensor, step: Any) -> torch.Tensor:
                matrix = step.cache.states.matrix(1)
                seen.append((matrix.shape, matrix.device.type))
                assert (step.pieces is None) == all(each.length == 1 for each in step.segments)
                return cast(torch.Tensor, model(tokens, step))

        return Watching()

    plan_load(replace(wanted, family=replace(wanted.family, build=watched)), machine())
    assert set(seen) == {(torch.Size((SLOTS, 2, 16, 32)), "meta")}
