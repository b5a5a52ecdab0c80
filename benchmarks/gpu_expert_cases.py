"""What benchmarks/kernels.py times of a mixture of experts: the choice, its order, and the two products.

This file times nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gpu_bench_kit import Bench, random_matrix
from gpu_kernel_cases import TINY, Case, Sizes, Work
from hipfire.kernels.experts import PackedExperts
from hipfire.kernels.gpu.expert_sort import sort_pairs
from hipfire.kernels.gpu.experts import expert_down, expert_gated
from hipfire.kernels.gpu.route import route

# choices that are gone through, so that weights of the last one are not in a cache
CHOICES = 16


@dataclass(frozen=True)
class _Mixture:
    """Experts of `width` in a model of width `hidden`; each token takes `chosen` and a shared one."""

    experts: int
    chosen: int
    hidden: int
    width: int

    @property
    def places(self) -> int:
        return self.chosen + 1

    def ids(self, tokens: int, seed: int) -> torch.Tensor:
        """Random choices, int32 [tokens, places]; the shared expert is the last of the stack."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(tokens, self.experts, generator=generator)
        shared = torch.full((tokens, 1), self.experts)
        return torch.cat((scores.topk(self.chosen, dim=1).indices, shared), dim=1).int()


def expert_cases(sizes: Sizes) -> Iterator[Case]:
    """Return the cases: the experts of the 35B mixture, or very few."""
    tiny = sizes is TINY
    mixture = _Mixture(4, 2, 32, 16) if tiny else _Mixture(256, 8, 2048, 512)
    tokens = (1, *sizes.some_rows[:2], *sizes.many_rows)
    for count in (1, tokens[-1]):
        yield Case("route", f"{mixture.chosen} of {mixture.experts} x{count}", _routes(mixture, count))
    for count in tokens[1:]:
        yield Case("order of pairs", f"{count} tokens", _orders(mixture, count))
    for layout in sizes.layouts:
        for count in tokens:
            yield Case("experts gated", f"{layout} {count} tokens", _gated(mixture, layout, count))
        for count in tokens:
            yield Case("experts down", f"{layout} {count} tokens", _down(mixture, layout, count))


def _routes(mixture: _Mixture, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        both = torch.randn(tokens, mixture.experts + 1, device=bench.device)
        logits, gate = both[:, :-1], both[:, -1:]

        def run() -> None:
            for _ in range(CHOICES):
                engine.settle()
                route(engine, logits, mixture.chosen, True, gate)

        return Work(run, CHOICES, both.nbytes + 8 * tokens * mixture.places)

    return build


def _orders(mixture: _Mixture, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine, ids = bench.engine(), mixture.ids(tokens, 0).to(bench.device)

        def run() -> None:
            for _ in range(CHOICES):
                engine.settle()
                sort_pairs(engine, ids, mixture.experts + 1, 64)

        return Work(run, CHOICES, 2 * ids.nbytes)

    return build


def _gated(mixture: _Mixture, layout: str, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        stack = _stack(bench, mixture, layout, 2 * mixture.width, mixture.hidden)
        engine, choices = bench.engine(), _choices(bench, mixture, tokens)
        x = torch.randn(tokens, mixture.hidden, device=bench.device)

        def run() -> None:
            for ids in choices:
                engine.settle()
                expert_gated(engine, x, ids, stack, "silu")

        return _work(run, stack, choices, x.nbytes)

    return build


def _down(mixture: _Mixture, layout: str, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        stack = _stack(bench, mixture, layout, mixture.hidden, mixture.width)
        engine, choices = bench.engine(), _choices(bench, mixture, tokens)
        hidden = torch.randn(tokens * mixture.places, mixture.width, device=bench.device)
        weights = torch.rand(tokens, mixture.places, device=bench.device)

        def run() -> None:
            for ids in choices:
                engine.settle()
                expert_down(engine, hidden, ids, weights, stack)

        return _work(run, stack, choices, hidden.nbytes)

    return build


def _stack(bench: Bench, mixture: _Mixture, layout: str, rows: int, cols: int) -> PackedExperts:
    experts = mixture.experts + 1
    return PackedExperts(random_matrix(bench, layout, experts * rows, cols), experts)


def _choices(bench: Bench, mixture: _Mixture, tokens: int) -> list[torch.Tensor]:
    return [mixture.ids(tokens, seed).to(bench.device) for seed in range(CHOICES)]


def _work(
    run: Callable[[], None], stack: PackedExperts, choices: Sequence[torch.Tensor], nbytes: int
) -> Work:
    """The bytes of the experts that are chosen, in the mean, and of the activations."""
    taken = sum(len(set(ids.flatten().tolist())) for ids in choices) / len(choices)
    read = round(stack.matrix.nbytes / stack.experts * taken)
    operations = 2 * choices[0].numel() * stack.rows * stack.cols
    return Work(run, len(choices), read + nbytes, operations)
