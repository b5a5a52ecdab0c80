"""Experts on the CPU: ties, one token against many, and steps that are recorded and choose anew."""

from __future__ import annotations

import pytest
import torch
from cpu_kit import launcher_of, poisoned_memory, random_rows
from expert_cases import random_ids, random_stack

from hipfire.base.errors import InternalError
from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.linear import TILE
from hipfire.kernels.experts import (
    EXPERT_DOWN,
    EXPERT_GATED,
    ROUTE,
    FloatExperts,
    expert_gated_ref,
    route_ref,
)
from hipfire.kernels.fwht import fwht256
from hipfire.kernels.launch import Launcher

# one layout for each way in which products are made
SOME_LAYOUTS = ("u4g32", "o6g16", "i8g32", "u4g256", "f32", "bf16")


def test_equal_logits_go_to_the_lowest_numbers() -> None:
    logits = torch.zeros(4, 12)
    logits[1, 5:] = 1.0
    logits[2] = -torch.arange(12.0)
    logits[2, 3] = logits[2, 1]
    logits[3, 2::2] = -0.0
    ids, weights = launcher_of(2).run(ROUTE, logits, 4, True)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [0, 1, 3, 2], [0, 1, 2, 3]]
    assert torch.equal(weights[0], torch.full((4,), 0.25))


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((3, 20), float("nan"))
    logits[1, 4] = -torch.inf
    logits[2, 17:] = torch.tensor([1.0, 5.0, -2.0])
    ids, weights = launcher_of(1).run(ROUTE, logits, 4, True)
    assert torch.equal(ids, route_ref(logits, 4, True)[0])
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [18, 17, 19, 0]]
    assert weights.isnan().all()


@pytest.mark.parametrize("name", SOME_LAYOUTS)
def test_a_token_has_the_same_bytes_alone_and_among_many(name: str) -> None:
    tokens, places = 2 * TILE + 3, 3
    stack, _ = random_stack(name, 4, 2, 20, 96)
    down, _ = random_stack(name, 4, 1, 33, 96, seed=9)
    ids, weights = random_ids(tokens, places, 4), random_rows(tokens, places, seed=2)
    x, hidden = random_rows(tokens, 96, seed=4), random_rows(tokens * places, 96, seed=5)
    run = launcher_of(2).run
    gated = run(EXPERT_GATED, x, ids, stack, "silu")
    out = run(EXPERT_DOWN, hidden, ids, weights, down)
    for token in (0, TILE, tokens - 1):
        own = slice(token, token + 1)
        pairs = slice(token * places, (token + 1) * places)
        assert torch.equal(run(EXPERT_GATED, x[own], ids[own], stack, "silu"), gated[pairs])
        assert torch.equal(run(EXPERT_DOWN, hidden[pairs], ids[own], weights[own], down), out[own])


@pytest.mark.parametrize("tokens", [1, 3])
def test_results_are_rotated_where_the_next_weights_are(tokens: int) -> None:
    stack, _ = random_stack("f32", 3, 2, 256, 40)
    x, ids = random_rows(tokens, 40, seed=1), random_ids(tokens, 2, 3)
    run = launcher_of(2).run
    for activation in ("silu", "gelu_pytorch_tanh"):
        plain = run(EXPERT_GATED, x, ids, stack, activation)
        want = expert_gated_ref(x, ids, stack, activation)
        assert torch.allclose(plain, want, rtol=1e-4, atol=1e-4 * float(want.std()))
        assert torch.equal(run(EXPERT_GATED, x, ids, stack, activation, rotated=True), fwht256(plain))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["u4g256", "f32"])
def test_a_recorded_step_serves_other_experts(name: str, tokens: int) -> None:
    stack, _ = random_stack(name, 6, 2, 16, 64)
    down, _ = random_stack(name, 6, 1, 64, 16, seed=7)
    engine = CpuEngine(2)
    launcher = Launcher(engines={"numba": engine})

    def step(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids, weights = launcher.run(ROUTE, logits, 2, True)
        hidden = launcher.run(EXPERT_GATED, x, ids, stack, "silu")
        out: torch.Tensor = launcher.run(EXPERT_DOWN, hidden, ids, weights, down)
        return out

    with poisoned_memory():
        x, logits = random_rows(tokens, 64, seed=1), random_rows(tokens, 6, seed=2)
        engine.record()
        out = step(x, logits)
        program = engine.finish()
    assert program is not None
    first = out.clone()
    for seed in (3, 4):
        x.copy_(random_rows(tokens, 64, seed=seed))
        logits.copy_(random_rows(tokens, 6, seed=seed + 10))
        out.fill_(float("nan"))
        program.run()
        assert torch.equal(out, step(x.clone(), logits.clone()))
        assert not torch.equal(out, first)


def test_only_panels_have_kernels() -> None:
    with pytest.raises(InternalError, match="panels"):
        launcher_of(1).run(
            EXPERT_GATED, torch.zeros(1, 4), random_ids(1, 1, 2), FloatExperts(torch.zeros(2, 4, 4)), "silu"
        )
