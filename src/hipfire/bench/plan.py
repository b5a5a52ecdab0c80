"""What a benchmark measures: lengths, contexts, batches, repeats; checked before any time is spent.

This file knows numbers of tokens. It does not know models, clocks or tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hipfire.base.errors import ContextLengthError, ValidationError

PREFILL_LENGTHS: Final = (128, 512, 1024)
DECODE_CONTEXTS: Final = (0,)
MATRIX_LENGTHS: Final = (128, 512, 2048, 4096, 8192, 20000)
# a prefill below this is mostly the cost of starting operations
SHORT_PROMPT: Final = 64

# fields of the options and the least value of each
_LISTS: Final = {"pp": 1, "ctx": 0, "batch": 1}
# a decode rate needs a token after the first
_NUMBERS: Final = {"tg": 1, "max_tokens": 2, "runs": 1, "warmups": 0}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a caller may choose. Raises ValidationError when constructed.

    `pp` are lengths of synthetic prefills and `ctx` contexts to decode from, both in tokens; None takes the
    default ones that fit, of which `matrix` has more. `batch` are numbers of sequences decoded at once, each
    combined with every context. `tg` is the number of decode steps, `max_tokens` the length of the reply to
    the real prompt. `warmups` come before the `runs` of each measurement and do not count.
    """

    pp: tuple[int, ...] | None = None
    ctx: tuple[int, ...] | None = None
    batch: tuple[int, ...] = (1,)
    tg: int = 128
    max_tokens: int = 128
    runs: int = 5
    warmups: int = 2
    matrix: bool = False

    def __post_init__(self) -> None:
        for name, low in _LISTS.items():
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _checked_list(name, values, low))
        for name, low in _NUMBERS.items():
            _check_number(name, getattr(self, name), low)

    @property
    def slots(self) -> int:
        """Return the number of sequences that the cache must hold."""
        return max(self.batch)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Decode steps of `batch` sequences at once, each after a context of `ctx` tokens."""

    batch: int
    ctx: int


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What will be measured, in order; everything in it fits the context."""

    prefill: tuple[int, ...]
    decode: tuple[DecodePoint, ...]
    tg: int
    max_tokens: int
    runs: int
    warmups: int
    warnings: tuple[str, ...]


def plan_bench(options: BenchOptions, prompt_tokens: int, max_seq: int) -> BenchPlan:
    """Return what to measure in a context of `max_seq` tokens, with a real prompt of `prompt_tokens`.

    Default lengths that do not fit are left out with a warning. Raises ContextLengthError if the prompt and
    its reply, a length that was asked for, or the shortest default one do not fit.
    """
    if prompt_tokens + options.max_tokens > max_seq:
        raise ContextLengthError(
            prompt_tokens + options.max_tokens,
            max_seq,
            hint=f"the prompt has {prompt_tokens}: shorten it, lower max_tokens or raise memory.max_seq",
        )
    lengths = options.pp or (MATRIX_LENGTHS if options.matrix else PREFILL_LENGTHS)
    contexts = options.ctx or (MATRIX_LENGTHS if options.matrix else DECODE_CONTEXTS)
    prefill = _fitting("pp", lengths, 0, max_seq, strict=options.pp is not None)
    starts = _fitting("ctx", contexts, options.tg, max_seq, strict=options.ctx is not None)
    warnings = [*_left_out("pp", lengths, prefill, max_seq), *_left_out("ctx", contexts, starts, max_seq)]
    if prompt_tokens < SHORT_PROMPT:
        warnings.append(
            f"the prompt has only {prompt_tokens} tokens: its prefill rate is mostly launch overhead"
        )
    return BenchPlan(
        prefill=prefill,
        decode=tuple(DecodePoint(batch, ctx) for ctx in starts for batch in options.batch),
        tg=options.tg,
        max_tokens=options.max_tokens,
        runs=options.runs,
        warmups=options.warmups,
        warnings=tuple(warnings),
    )


def _fitting(
    name: str, lengths: tuple[int, ...], extra: int, max_seq: int, *, strict: bool
) -> tuple[int, ...]:
    """Return the lengths that fit with `extra` tokens; `strict`: raise ContextLengthError if one does not."""
    fitting = tuple(length for length in lengths if length + extra <= max_seq)
    if not fitting or (strict and fitting != lengths):
        worst = max(lengths) if strict else min(lengths)
        steps = f" with tg {extra}" if extra else ""
        raise ContextLengthError(
            worst + extra,
            max_seq,
            hint=f"{name} {worst}{steps} does not fit: lower it or raise memory.max_seq",
        )
    return fitting


def _left_out(name: str, lengths: tuple[int, ...], kept: tuple[int, ...], max_seq: int) -> list[str]:
    """Return a warning about lengths that are not measured, if there are any."""
    missing = ", ".join(str(length) for length in lengths if length not in kept)
    return [f"{name} {missing} left out: the context holds {max_seq} tokens"] if missing else []


def _checked_list(name: str, values: Sequence[int], low: int) -> tuple[int, ...]:
    """Return the values without repeats, in their order."""
    if not values:
        raise ValidationError(f"{name} is an empty list", hint="give at least one number or leave it out")
    for value in values:
        _check_number(name, value, low)
    return tuple(dict.fromkeys(values))


def _check_number(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValidationError(f"{name}: {value!r} is not allowed", hint=f"use a whole number from {low} up")
