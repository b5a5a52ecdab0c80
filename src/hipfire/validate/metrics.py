"""Numbers that say how far one set of outputs is from another; all in float64.

This file does not know models, files or thresholds: it takes tensors and returns floats. Arguments that
cannot be compared (other shapes, nothing in them, NaN) raise `ValidationError`, since a NaN figure would
pass or fail a gate by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from hipfire.base.errors import ValidationError

# logits per block of rows: a long text over a large vocabulary must not be turned into float64 all at once
BLOCK_ELEMENTS: Final = 1 << 23


def relative_rms(test: torch.Tensor, reference: torch.Tensor) -> float:
    """Return rms(test - reference) / rms(reference) over two finite tensors of one shape.

    A reference of zeros has no scale and is refused.
    """
    if test.shape != reference.shape:
        raise ValidationError(f"shapes differ: {list(test.shape)} against {list(reference.shape)}")
    if reference.numel() == 0:
        raise ValidationError("there is nothing to compare: the tensors are empty")
    for name, tensor in (("test", test), ("reference", reference)):
        if not bool(torch.isfinite(tensor).all()):
            raise ValidationError(f"the {name} tensor holds NaN or infinite values")
    exact = reference.detach().to(torch.float64)
    scale = torch.linalg.vector_norm(exact)
    if scale == 0:
        raise ValidationError("the reference is all zeros, so a relative error has no meaning")
    error = torch.linalg.vector_norm(test.detach().to(exact) - exact)
    return float(error / scale)


def kl_divergence(test: torch.Tensor, reference: torch.Tensor) -> float:
    """Return KL(reference || test) in nats, averaged over the rows of two [rows, vocab] logits.

    A logit of -inf is a probability of zero: it costs nothing in the reference, and makes the result
    infinite where only the test has it.
    """
    _check_logits("test", test)
    _check_logits("reference", reference)
    _check_same_shape(test, reference)
    total = 0.0
    for rows in _row_blocks(reference):
        expected = torch.log_softmax(reference[rows].detach().to(torch.float64), dim=-1)
        actual = torch.log_softmax(test[rows].detach().to(expected), dim=-1)
        weight = expected.exp()
        total += float(torch.where(weight > 0, weight * (expected - actual), 0.0).sum())
    # rounding may leave a sum of zeros a hair below zero, which no divergence is
    return max(total / reference.shape[0], 0.0)


def top1_agreement(test: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the share of rows (0 to 1) of two [rows, vocab] logits that agree on the largest logit.

    Ties count by the lowest index, as the greedy sampler takes them.
    """
    _check_logits("test", test)
    _check_logits("reference", reference)
    _check_same_shape(test, reference)
    same = test.argmax(dim=-1) == reference.argmax(dim=-1).to(test.device)
    return float(same.to(torch.float64).mean())


def perplexity(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return exp(mean negative log-likelihood) of `targets` [rows] under `logits` [rows, vocab].

    Row i of the logits is the prediction of targets[i]: the caller has already shifted the text by one
    token. The result is infinite where a target has probability zero.
    """
    _check_logits("logits", logits)
    rows, vocab = logits.shape
    if targets.dtype not in (torch.int64, torch.int32) or tuple(targets.shape) != (rows,):
        raise ValidationError(
            f"targets are {targets.dtype} {list(targets.shape)} but must be integer ids [{rows}]"
        )
    if not bool(((targets >= 0) & (targets < vocab)).all()):
        raise ValidationError(f"targets hold an id outside 0..{vocab - 1}")
    ids = targets.to(logits.device, torch.int64)
    total = torch.zeros((), dtype=torch.float64)
    for block in _row_blocks(logits):
        logprobs = torch.log_softmax(logits[block].detach().to(torch.float64), dim=-1)
        total -= logprobs.gather(1, ids[block, None]).sum().cpu()
    return float(torch.exp(total / rows))


def _row_blocks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _check_logits(name: str, logits: torch.Tensor) -> None:
    if logits.ndim != 2 or logits.numel() == 0 or not logits.is_floating_point():
        raise ValidationError(
            f"{name} is {logits.dtype} {list(logits.shape)} "
            "but must be floating point [rows, vocab] and not empty"
        )
    peaks = logits.amax(dim=-1)
    if not bool(torch.isfinite(peaks).all()):
        raise ValidationError(f"{name} holds a row with NaN, with +inf, or with nothing above -inf")


def _check_same_shape(test: torch.Tensor, reference: torch.Tensor) -> None:
    if test.shape != reference.shape:
        raise ValidationError(f"shapes differ: {list(test.shape)} against {list(reference.shape)}")
