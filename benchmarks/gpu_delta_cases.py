"""What benchmarks/kernels.py times of gated DeltaNet layers: decode steps and prompts, of whole layers.

This file times nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_bench_kit import Bench
from gpu_kernel_cases import TINY, Case, Sizes, Work
from hipfire.kernels.gpu.delta_net import delta_net
from hipfire.kernels.gpu.rowwise import product_type

WIDTH = 4


@dataclass(frozen=True)
class _Heads:
    keys: int
    values: int
    d: int

    @property
    def channels(self) -> int:
        return (2 * self.keys + self.values) * self.d

    @property
    def inner(self) -> int:
        return self.values * self.d


def delta_cases(sizes: Sizes) -> Iterator[Case]:
    """Return the cases: the heads of the dense 27B model and of the 35B mixture, or very few."""
    found = (_Heads(1, 2, 16),) if sizes is TINY else (_Heads(16, 48, 128), _Heads(16, 32, 128))
    for heads in found:
        name = f"{heads.values}x{heads.d}"
        for sequences in (1, sizes.sequences):
            yield Case("delta net step", f"{name} x{sequences}", _case(sizes, heads, sequences, 1))
        for tokens in sizes.prompts:
            yield Case("delta net prompt", f"{name} {tokens} tokens", _case(sizes, heads, 1, tokens))


def _case(sizes: Sizes, heads: _Heads, sequences: int, each: int) -> Callable[[Bench], Work]:
    """Return what builds as many layers as the working set asks for, for so many tokens of each sequence."""

    def build(bench: Bench) -> Work:
        engine, device, tokens = bench.engine(), bench.device, sequences * each
        state = 4 * (heads.inner * heads.d + heads.channels * (WIDTH - 1))
        layers = max(2, math.ceil(sizes.working_set / (sequences * state)))
        tails = torch.zeros(layers, sequences, heads.channels, WIDTH - 1, device=device)
        matrices = torch.zeros(layers, sequences, heads.values, heads.d, heads.d, device=device)
        kind = product_type(engine, tokens)
        columns = [heads.channels, heads.inner, heads.values, heads.values]
        joined = torch.randn(tokens, sum(columns), device=device).to(kind)
        mixed, z, b, a = torch.split(joined, columns, dim=1)
        conv = torch.randn(heads.channels, WIDTH, device=device)
        decay = -torch.rand(heads.values, device=device)
        bias, norm = torch.zeros(heads.values, device=device), torch.ones(heads.d, device=device)
        places = [(slot, 1000 + place) for slot in range(sequences) for place in range(each)]
        rows = torch.tensor(places, device=device)
        pieces = None
        if each > 1:
            table = [(slot * each, each) for slot in range(sequences)]
            pieces = torch.tensor(table, dtype=torch.int32, device=device)

        def run() -> None:
            for tail, matrix in zip(tails, matrices, strict=True):
                engine.settle()
                delta_net(engine, mixed, z, b, a, conv, decay, bias, norm, tail, matrix, rows, pieces, 1e-6)

        own = tokens * heads.inner * kind.itemsize
        # a token's part of the recurrence: what its key and query see, what it writes, and the decay
        operations = 7 * tokens * heads.inner * heads.d
        return Work(run, layers, joined.nbytes + own + 2 * sequences * state, operations)

    return build
