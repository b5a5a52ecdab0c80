"""Cases of gated DeltaNet layers: results and states against a recurrence in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from cpu_kit import Case, padded, random_rows

from hipfire.kernels.delta_net import DELTA_NET, L2_EPS

EPS = 1e-6
# slot, position, tokens
Piece = tuple[int, int, int]
STEPS: dict[str, list[Piece]] = {
    "one token": [(1, 5, 1)],
    "the first token": [(0, 0, 1)],
    "several sequences": [(2, 7, 1), (0, 0, 1), (1, 1, 1)],
    "a prompt": [(1, 0, 9)],
    "a prompt that goes on": [(1, 3, 7)],
    "prompts and single tokens": [(2, 0, 5), (0, 6, 1), (1, 0, 2), (3, 2, 4)],
}
# key heads, value heads, key size, value size, width
SHAPES = ((2, 4, 16, 32, 4), (1, 3, 48, 64, 2), (4, 4, 32, 32, 3), (2, 6, 16, 96, 5))


def delta_net_cases() -> Iterator[Case]:
    for label, pieces in STEPS.items():
        for number, shape in enumerate(SHAPES):
            for tiled in (False, True):
                yield _case(f"{label}, {shape}{' tiled' * tiled}", pieces, shape, number, tiled=tiled)


def _case(label: str, pieces: Sequence[Piece], shape: tuple[int, ...], seed: int, *, tiled: bool) -> Case:
    keys, values, dk, dv, width = shape
    channels, tokens = 2 * keys * dk + values * dv, sum(count for _, _, count in pieces)
    mixed = padded(random_rows(tokens, channels, seed=seed), 5)
    z = padded(random_rows(tokens, values * dv, seed=seed + 1), 7)
    b, a = (padded(random_rows(tokens, values, seed=seed + 2 + i, size=2.0), 3) for i in (0, 1))
    conv = random_rows(channels, width, seed=seed + 4, size=0.5)
    decay = -torch.rand(values, generator=torch.Generator().manual_seed(seed)) * 3 - 0.01
    bias, norm = random_rows(values, seed=seed + 5), 1 + random_rows(dv, seed=seed + 6, size=0.3)
    weights = (conv, decay, bias, norm)
    memory = torch.full((4, channels * (width - 1) + values * dk * dv), float("nan"))
    for slot, position, _ in pieces:
        if position:
            memory[slot] = random_rows(memory.shape[1], seed=seed + 7 + slot, size=0.5)
    want = _recurrence((mixed, z, b, a), weights, _views(memory.double(), shape), pieces, tiled=tiled)
    rows = torch.tensor([(slot, at + i) for slot, at, count in pieces for i in range(count)])
    first, table = 0, []
    for _, _, count in pieces:
        table.append((first, count))
        first += count
    given = None if all(count == 1 for _, count in table) else torch.tensor(table, dtype=torch.int32)

    def run(launcher: Any) -> list[torch.Tensor]:
        own = memory.clone()
        tail, matrix = _views(own, shape)
        inputs = (mixed, z, b, a, *weights, tail, matrix, rows, given, EPS)
        out = launcher.run(DELTA_NET, *inputs, tiled=tiled)
        named = sorted({slot for slot, _, _ in pieces})
        others = [slot for slot in range(4) if slot not in named]
        assert torch.isnan(own[others]).all(), "a state of another slot was written"
        return [out, tail[named], matrix[named]]

    return Case(label, run, want, 3e-6, rowwise=True)


def _views(memory: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values, dk, dv, width = shape
    channels = 2 * keys * dk + values * dv
    split = channels * (width - 1)
    return memory[:, :split].view(4, channels, width - 1), memory[:, split:].view(4, values, dk, dv)


def _recurrence(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    states: tuple[torch.Tensor, torch.Tensor],
    pieces: Sequence[Piece],
    *,
    tiled: bool,
) -> list[Any]:
    """Return result, tails and matrices, head by head in loops."""
    mixed, z, b, a = (x.double() for x in inputs)
    conv, decay, bias, norm = (x.double() for x in weights)
    tails, matrices = states
    _, values, dk, dv = matrices.shape
    keys = (mixed.shape[1] - values * dv) // (2 * dk)
    out, token = torch.zeros(len(mixed), values, dv, dtype=torch.float64), 0
    for slot, position, count in pieces:
        if position == 0:
            tails[slot], matrices[slot] = 0, 0
        for _ in range(count):
            window = torch.cat((tails[slot], mixed[token][:, None]), 1)
            tails[slot] = window[:, 1:].clone()
            x = torch.nn.functional.silu((window * conv).sum(1))
            for head in range(values):
                read = head % keys if tiled else head * keys // values
                q, k = (x[(part * keys + read) * dk :][:dk] for part in (0, 1))
                v = x[2 * keys * dk + head * dv :][:dv]
                q, k = (y / (y.square().sum() + L2_EPS).sqrt() for y in (q, k))
                state = (
                    matrices[slot, head]
                    * (decay[head] * torch.nn.functional.softplus(a[token, head] + bias[head])).exp()
                )
                state = state + torch.outer(k, b[token, head].sigmoid() * (v - state.T @ k))
                matrices[slot, head] = state
                seen = state.T @ q / dk**0.5
                seen = seen / (seen.square().mean() + EPS).sqrt() * norm
                gate = z[token, head * dv : (head + 1) * dv]
                out[token, head] = seen * torch.nn.functional.silu(gate)
            token += 1
    named = sorted({slot for slot, _, _ in pieces})
    return [out.flatten(1).numpy(), tails[named].numpy(), matrices[named].numpy()]
