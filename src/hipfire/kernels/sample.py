"""The next token of each row, chosen on the device: a draw after penalties and cuts, or the largest logit.

The stages and their order are those of the host's sampler. What only the host offers: biases, blocked
tokens, grammars and log-probabilities. A row depends on its own logits, settings, history and draw alone.
This file does not know requests or text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hipfire.base.sampling import GREEDY_TEMPERATURE, SamplingParams
from hipfire.kernels.launch import Op

# stands for an unused place of a history, and for a row without an answer
NO_TOKEN = -1
# numbers of tokens are kept as float32, exact up to here
_MOST_TOKENS = 1 << 24


class Setting(enum.IntEnum):
    """The columns of a row's settings."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    REPEAT = 4
    PRESENCE = 5
    FREQUENCY = 6


@dataclass(frozen=True, slots=True)
class SampleStages:
    """The costly stages that at least one row of a batch asks for; each may be on for nothing."""

    penalties: bool = True
    top_k: bool = True
    top_p: bool = True


def pack_settings(params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return what a batch asks for as float32 [B, 7], on the CPU, in the columns of `Setting`."""
    rows = [
        (
            0.0 if row.greedy else row.temperature,
            max(0, min(row.top_k, _MOST_TOKENS)),
            row.top_p,
            row.min_p,
            row.repeat_penalty,
            row.presence_penalty,
            row.frequency_penalty,
        )
        for row in params
    ]
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), len(Setting))


def stages(params: Sequence[SamplingParams]) -> SampleStages:
    """Return the stages that a batch needs."""
    drawing = [row for row in params if not row.greedy]
    return SampleStages(
        penalties=any(row.penalizes for row in params),
        top_k=any(row.top_k > 0 for row in drawing),
        top_p=any(row.top_p < 1 for row in drawing),
    )


def sample_ref(
    logits: torch.Tensor,
    settings: torch.Tensor,
    draws: torch.Tensor,
    history: torch.Tensor | None = None,
    vocabulary: int | None = None,
    needed: SampleStages | None = None,
) -> torch.Tensor:
    """Return the next tokens, int64 [B], of float32 logits [B, V].

    settings [B, 7] as `pack_settings` makes them; draws float32 [B], from 0 to below 1. history int64 [B, W]:
    the tokens that penalties count, `NO_TOKEN` in unused places. Only the first `vocabulary` logits (None:
    all) belong to tokens. `needed` names the stages that may have work (None: all); a stage left out must be
    off in every row. The token is `NO_TOKEN` where logits are NaN or +inf, or none is left. Ties go to the
    larger logit, then to the smaller id. The reference computes in float64, kernels in float32.
    """
    rows = [
        _sample_row(
            logits[row, :vocabulary].double(),
            settings[row].tolist(),
            float(draws[row]),
            None if history is None else history[row],
        )
        for row in range(logits.shape[0])
    ]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device)


def _sample_row(
    values: torch.Tensor, settings: Sequence[float], draw: float, history: torch.Tensor | None
) -> int:
    if history is not None:
        penalize(values, settings, history)
    peak = values.max()
    if not torch.isfinite(peak):
        return NO_TOKEN
    if settings[Setting.TEMPERATURE] <= GREEDY_TEMPERATURE:
        return int((values == peak).nonzero()[0])
    order = values.sort(descending=True, stable=True).indices
    top_k = int(settings[Setting.TOP_K])
    order = order[:top_k] if top_k > 0 else order
    weights = ((values - peak) / settings[Setting.TEMPERATURE]).exp()
    weights[weights < settings[Setting.MIN_P]] = 0.0
    if settings[Setting.TOP_P] < 1:
        reached = weights[order].cumsum(0)
        crossing = int((reached < settings[Setting.TOP_P] * reached[-1]).sum())
        order = order[: crossing + 1]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    running = kept.cumsum(0)
    return int((running <= draw * running[-1]).sum())


def penalize(values: torch.Tensor, settings: Sequence[float], history: torch.Tensor) -> None:
    """Apply the penalties in place, to each distinct token once."""
    ids, counts = torch.unique(history[(history >= 0) & (history < values.numel())], return_counts=True)
    seen = values[ids]
    seen = torch.where(seen > 0, seen / settings[Setting.REPEAT], seen * settings[Setting.REPEAT])
    values[ids] = seen - settings[Setting.PRESENCE] - settings[Setting.FREQUENCY] * counts


def greedy_ref(logits: torch.Tensor, vocabulary: int | None = None) -> torch.Tensor:
    """Return the ids of the largest logits, int64 [B], for float32 logits [B, V]; the smallest of equal ones.

    Only the first `vocabulary` logits (None: all) belong to tokens. `NO_TOKEN` where they are NaN or +inf, or
    all -inf.
    """
    values = logits[:, :vocabulary]
    peak = values.amax(dim=1, keepdim=True)
    first = (values == peak).long().argmax(dim=1)
    return torch.where(peak.isfinite().squeeze(1), first, NO_TOKEN)


SAMPLE = Op("sample", sample_ref, {"triton": "hipfire.kernels.gpu.sample.sample"})
GREEDY = Op("greedy", greedy_ref, {"triton": "hipfire.kernels.gpu.sample.greedy"})
