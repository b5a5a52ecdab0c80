"""Turns one row of logits into a token: blocks, biases, penalties, greedy choice or a seeded draw.

This file does not know models, caches, batches or text. A sampler belongs to one request: what it draws
depends on that request's logits, history, parameters and seed alone, never on neighbours in a batch. Ties
are broken everywhere by the larger logit, then the smaller id. The arithmetic is float64 and never writes
to the caller's tensor.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hipfire.base.errors import InternalError, ValidationError
from hipfire.base.sampling import GenerationParams, SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.intp]
Mask = NDArray[np.bool_]

# below this many candidates sorting beats splitting
SORT_AT_MOST: Final = 1024
DRAW_BLOCK: Final = 512

# top_p looks first at tokens of this weight or more, relative to the largest, if they are at most this share
NEAR: Final = 1e-5
NEAR_SHARE: Final = 0.25


class SampledToken(NamedTuple):
    """A token id and the natural logarithm of its probability, None where nobody asked for it."""

    id: int
    logprob: float | None


class Sampler:
    """The sampler of one request.

    `vocab_size` is the number of logits per row, `real_vocab_size` the number of them that belong to a
    token (the rest pads the output matrix and is never drawn). `end_ids` are the tokens that end a turn;
    `generation` says whether and from where on they may be drawn, and whether log-probabilities are wanted.
    `blocked_ids` are never drawn. Raises `ValidationError` for an id outside the vocabulary or impossible
    sizes.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        real_vocab_size: int | None = None,
        *,
        generation: GenerationParams | None = None,
        end_ids: Iterable[int] = (),
        blocked_ids: Iterable[int] = (),
    ) -> None:
        real = vocab_size if real_vocab_size is None else real_vocab_size
        if not 1 <= real <= vocab_size:
            raise ValidationError(f"{real} tokens do not fit a vocabulary of {vocab_size} logits")
        generation = GenerationParams() if generation is None else generation
        blocked = _checked_ids("blocked_ids", blocked_ids, real)
        # a tokenizer may declare an end token that the model has no row for: it can't be drawn in any case
        ends = _checked_ids("end_ids", (end for end in end_ids if end < real), real)
        self._params = params
        self._vocab_size = vocab_size
        self._real_vocab_size = real
        self._min_tokens = generation.min_tokens
        self._wants_logprob = generation.top_logprobs is not None
        self._blocked_early = np.union1d(blocked, ends)
        self._blocked = self._blocked_early if generation.ignore_eos else blocked
        self._biased = _checked_ids("logit_bias", (token for token, _ in params.logit_bias), real)
        self._biases = np.asarray([bias for _, bias in params.logit_bias])
        # 53 bits survive a client that keeps numbers as doubles
        self._seed = secrets.randbits(53) if params.seed is None else params.seed
        self._generated = 0
        # every pass over a vocabulary works in these: fresh megabytes cost more in page faults than in
        # arithmetic, and memory that is never touched (plain greedy) costs nothing
        self._values, self._weights, self._work = (np.empty(real) for _ in range(3))

    @property
    def seed(self) -> int:
        """Return the seed in use: the caller's, or the one drawn for this request."""
        return self._seed

    @property
    def generated(self) -> int:
        """Return how many tokens this sampler has returned."""
        return self._generated

    def sample(
        self, logits: torch.Tensor, history: Sequence[int], allowed: Mask | None = None
    ) -> SampledToken:
        """Return the next token for float32 `logits` [vocab_size] on any device.

        `history` holds the ids of the prompt and of the reply so far, the newest last; penalties count them
        alike, wherever the prompt's cache entries came from. Only tokens that are true in `allowed`
        [real_vocab_size] are drawn; None allows all. Raises `InternalError`, and advances nothing,
        when a logit is NaN or infinite, when no token is left to draw, or for malformed input.
        """
        row = self._row(logits)
        early = self._generated < self._min_tokens
        blocked = self._blocked_early if early else self._blocked
        plain = self._params.greedy and not self._params.penalizes and not self._biased.size
        token = int((row.numpy() if row.is_cpu else row).argmax()) if plain else -1  # numpy's is fast
        if plain:
            _check_peak(float(row[token].item()))
        if token < 0 or token in blocked or not (allowed is None or allowed[token]):
            token = self._choose(self._load(row), history, blocked, allowed)
        logprob = None
        if self._wants_logprob:
            logprob = float(row[token].item()) - self._log_total(self._load(row))
        self._generated += 1
        return SampledToken(token, logprob)

    def top_logprobs(self, logits: torch.Tensor, k: int) -> list[SampledToken]:
        """Return the `k` most probable tokens of `logits` [vocab_size], the most probable first.

        Probabilities are those of the model: before blocks, penalties and temperature, and independent of
        `k`. Fewer than `k` come back when fewer tokens have a probability above zero. Raises
        `InternalError` for logits that are NaN or infinite and `ValidationError` for a negative `k`.
        """
        if k < 0:
            raise ValidationError(f"top_logprobs is {k} but must be at least 0")
        values = self._load(self._row(logits))
        total = self._log_total(values)
        ids = np.flatnonzero(_largest(values, k, self._work))
        ids = ids[np.argsort(-values[ids], kind="stable")]
        return [SampledToken(int(i), float(values[i]) - total) for i in ids if values[i] > -math.inf]

    def _row(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that belong to tokens, as a view."""
        if logits.dtype != torch.float32 or tuple(logits.shape) != (self._vocab_size,):
            raise InternalError(
                f"logits are {logits.dtype} {list(logits.shape)} "
                f"but must be torch.float32 [{self._vocab_size}]"
            )
        return logits.detach()[: self._real_vocab_size]

    def _load(self, row: torch.Tensor) -> Floats:
        """Copy a row of logits into `_values`, which later stages may change, and check it."""
        host: NDArray[Any] = row.cpu().numpy()
        np.copyto(self._values, host)
        _check_peak(float(self._values.max()))
        return self._values

    def _log_total(self, values: Floats) -> float:
        """Return log(sum(exp(values)))."""
        peak = values.max()
        np.exp(np.subtract(values, peak, out=self._work), out=self._work)
        return float(peak) + math.log(float(self._work.sum()))

    def _choose(self, values: Floats, history: Sequence[int], blocked: Ids, allowed: Mask | None) -> int:
        """Return the chosen id; changes `values`."""
        values[blocked] = -np.inf
        if allowed is not None:
            values[~allowed] = -np.inf
        values[self._biased] += self._biases
        if self._params.penalizes:
            self._penalize(values, history)
        if values.max() == -np.inf:
            raise InternalError(
                "no token is left to draw: every candidate is blocked",
                hint="block fewer tokens, or do not ignore the end tokens",
            )
        if self._params.greedy:
            return int(values.argmax())
        ids, weights = self._candidates(values)
        place = _draw(weights, uniform(self._seed, self._generated))
        return place if ids is None else int(ids[place])

    def _penalize(self, values: Floats, history: Sequence[int]) -> None:
        """Apply the three penalties to `values` in place, to each distinct id of the window once."""
        window = self._params.penalty_window
        recent = np.asarray(history if window < 0 else history[-window:], dtype=np.intp)
        ids, counts = np.unique(recent, return_counts=True)
        if ids.size and (ids[0] < 0 or ids[-1] >= self._vocab_size):
            raise InternalError(f"the history holds a token id outside 0..{self._vocab_size - 1}")
        real = ids < values.size
        ids, counts = ids[real], counts[real]
        seen = values[ids]
        factor = self._params.repeat_penalty
        seen = np.where(seen > 0, seen / factor, seen * factor)
        values[ids] = seen - self._params.presence_penalty - self._params.frequency_penalty * counts

    def _candidates(self, values: Floats) -> tuple[Ids | None, Floats]:
        """Return what top_k, temperature, min_p and top_p leave: ascending ids (None: all) and their weights.

        Weights are not normalised and may be zero. Each cut works on the distribution that the ones before
        left.
        """
        params = self._params
        ids: Ids | None = None
        if 0 < params.top_k < values.size:
            ids = np.flatnonzero(_largest(values, params.top_k, self._work))
            values = values[ids]
        weights = np.subtract(values, values.max(), out=self._weights[: values.size])
        weights /= params.temperature
        np.exp(weights, out=weights)
        if params.min_p > 0:
            # the most probable token has weight 1, so this is relative to it and always keeps it
            weights[weights < params.min_p] = 0.0
        if params.top_p < 1:
            mass = params.top_p * float(weights.sum())
            # most rows have nearly all their mass in a few tokens: the passes below may look at those alone
            if np.count_nonzero(weights >= NEAR) < NEAR_SHARE * weights.size:
                near = np.flatnonzero(weights >= NEAR)
                if float(weights[near].sum()) >= mass:
                    ids, values, weights = near if ids is None else ids[near], values[near], weights[near]
            # logits, not weights, decide the order: different logits may round to one weight
            weights *= _largest(values, _count_for_mass(weights, mass, self._work), self._work)
        return ids, weights


def uniform(seed: int, draw: int) -> float:
    """Return the number in [0, 1) that belongs to a seed and a draw number (counter-based: no state)."""
    bits = int(np.random.Philox(key=seed, counter=draw).random_raw())
    return (bits >> 11) * 2.0**-53


def _draw(weights: Floats, share: float) -> int:
    """Return the first place where the running sum of `weights` exceeds `share` (0 to below 1) of their sum.

    Finds the block first, then the place in it, since a running sum over everything is slow. A weight of
    zero is never drawn.
    """
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, DRAW_BLOCK)))
    goal = share * ends[-1]
    block = int(np.searchsorted(ends, goal, side="right"))
    start = block * DRAW_BLOCK
    running = np.cumsum(weights[start : start + DRAW_BLOCK])
    if block:
        goal -= ends[block - 1]
    # the two sums of a block may differ by rounding, which must not lead past the block's last weight
    goal = min(goal, np.nextafter(running[-1], 0.0))
    return start + int(np.searchsorted(running, goal, side="right"))


def _checked_ids(name: str, ids: Iterable[int], size: int) -> Ids:
    """Return the distinct ids in ascending order."""
    for token in (ids := tuple(ids)):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise ValidationError(f"{name} holds {token!r} but token ids go from 0 to {size - 1}")
    return np.asarray(sorted(set(ids)), dtype=np.intp)


def _check_peak(peak: float) -> None:
    """Refuse a row by its largest logit, which is NaN as soon as any logit is."""
    if not math.isfinite(peak):
        raise InternalError(
            f"the model produced unusable logits: the largest is {peak}",
            hint="verify the model file; if it is intact, report this as a bug",
        )


def _largest(values: Floats, count: int, work: Floats) -> Mask:
    """Return a mask of the `count` largest values; of equal ones those with the smallest indices.

    `work` is scratch of at least the size of `values`; so in the next function.
    """
    if count >= values.size:
        return np.ones(values.size, dtype=np.bool_)
    if count == 0:
        return np.zeros(values.size, dtype=np.bool_)
    split = work[: values.size]
    np.copyto(split, values)
    split.partition(values.size - count)
    edge = split[values.size - count]
    kept: Mask = values > edge
    missing = count - int(np.count_nonzero(kept))
    kept[np.flatnonzero(values == edge)[:missing]] = True
    return kept


def _count_for_mass(weights: Floats, mass: float, work: Floats) -> int:
    """Return how many of the largest weights it takes to reach `mass`, the crossing one included; at least 1.

    Splits the weights at their median and goes on in the half where the crossing lies, so the work is
    linear in the number of weights, however flat they are.
    """
    count = 0
    open_weights = work[: weights.size]
    np.copyto(open_weights, weights)
    while open_weights.size > SORT_AT_MOST:
        middle = open_weights.size // 2
        open_weights.partition(middle)
        upper_mass = float(open_weights[middle:].sum())
        if upper_mass >= mass:
            open_weights = open_weights[middle:]
        else:
            count += open_weights.size - middle
            mass -= upper_mass
            open_weights = open_weights[:middle]
    reached = np.cumsum(np.sort(open_weights)[::-1])
    return count + min(int(np.searchsorted(reached, mass)) + 1, open_weights.size)
