"""Metrics against closed forms and against sums in plain Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from hipfire.base.errors import ValidationError
from hipfire.validate import metrics
from hipfire.validate.metrics import kl_divergence, perplexity, relative_rms, top1_agreement


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def log_softmax(row: list[float]) -> list[float]:
    peak = max(row)
    total = peak + math.log(math.fsum(math.exp(value - peak) for value in row))
    return [value - total for value in row]


# ---- relative rms


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.001, -3.0])
def test_relative_rms_of_a_scaled_tensor_is_the_distance_of_the_factor_from_one(factor: float) -> None:
    reference = random(7, 33).double()
    assert relative_rms(reference * factor, reference) == pytest.approx(abs(factor - 1), rel=1e-12)


def test_relative_rms_is_relative_to_the_reference_and_not_symmetric() -> None:
    assert relative_rms(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == pytest.approx(3 / 4)
    assert relative_rms(torch.tensor([0.0, 4.0]), torch.tensor([3.0, 4.0])) == pytest.approx(3 / 5)


def test_relative_rms_sums_in_float64() -> None:
    # the squares do not fit float32
    reference = torch.full((1 << 20,), 2.0**66)
    test = reference.clone()
    test[::2] *= 1 + 2**-20
    assert relative_rms(test, reference) == pytest.approx(2**-20 / math.sqrt(2), rel=1e-12)
    half = torch.full((4096,), 60000.0, dtype=torch.float16)
    assert relative_rms(half, half.float() * 2) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("test", "reference", "message"),
    [
        (torch.ones(3), torch.ones(4), "shapes differ"),
        (torch.ones(3), torch.ones(1, 3), "shapes differ"),
        (torch.ones(0), torch.ones(0), "empty"),
        (torch.ones(3), torch.zeros(3), "all zeros"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), "test tensor holds NaN"),
        (torch.ones(2), torch.tensor([1.0, math.inf]), "reference tensor holds NaN or infinite"),
    ],
)
def test_relative_rms_refuses_what_has_no_answer(
    test: torch.Tensor, reference: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        relative_rms(test, reference)


# ---- divergence


def test_kl_of_two_coins_is_the_closed_form() -> None:
    reference = torch.tensor([[math.log(0.5), math.log(0.5)]], dtype=torch.float64)
    test = torch.tensor([[math.log(0.9), math.log(0.1)]], dtype=torch.float64)
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    backward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert kl_divergence(test, reference) == pytest.approx(forward, rel=1e-12)
    assert kl_divergence(reference, test) == pytest.approx(backward, rel=1e-12)


def test_kl_is_the_mean_over_rows_of_plain_sums() -> None:
    test, reference = random(9, 40, seed=1), random(9, 40, seed=2)
    rows = []
    for actual_row, expected_row in zip(test.tolist(), reference.tolist(), strict=True):
        actual, expected = log_softmax(actual_row), log_softmax(expected_row)
        rows.append(math.fsum(math.exp(p) * (p - q) for p, q in zip(expected, actual, strict=True)))
    assert kl_divergence(test, reference) == pytest.approx(math.fsum(rows) / 9, rel=1e-12)


def test_kl_ignores_what_softmax_ignores() -> None:
    reference = random(5, 64).double()
    shifted = reference + torch.arange(5).double()[:, None] * 100
    assert kl_divergence(reference, reference) == 0
    assert 0 <= kl_divergence(shifted, reference) < 1e-12


def test_kl_resolves_differences_that_float32_would_lose() -> None:
    reference = random(3, 1000).double()
    step = torch.zeros(1000, dtype=torch.float64)
    step[0] = 1e-5
    p = reference.softmax(dim=-1)[:, 0]
    # second order of a small change of one logit: step**2 * p * (1 - p) / 2
    expected = float((1e-10 * p * (1 - p) / 2).mean())
    assert kl_divergence(reference + step, reference) == pytest.approx(expected, rel=1e-3)


def test_kl_with_impossible_tokens() -> None:
    both = torch.tensor([[0.0, 0.0, -math.inf]])
    only_two = torch.tensor([[0.0, 0.0, 0.0]])
    assert kl_divergence(both, both) == 0
    assert kl_divergence(only_two, both) == pytest.approx(math.log(3 / 2))
    assert kl_divergence(both, only_two) == math.inf
    # a reference probability that underflows to zero costs nothing either
    assert kl_divergence(both, torch.tensor([[0.0, 0.0, -800.0]])) == pytest.approx(0.0, abs=1e-12)


# ---- agreement


def test_top1_agreement_counts_rows_and_takes_the_lowest_index_on_ties() -> None:
    reference = torch.tensor([[1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [0.0, 3.0, 3.0], [0.0, 0.0, 1.0]])
    test = torch.tensor([[0.0, 9.0, 8.0], [1.0, 2.0, 0.0], [3.0, 4.0, 4.0], [0.0, 0.5, 0.5]])
    assert top1_agreement(test, reference) == 0.5
    assert top1_agreement(reference, reference) == 1.0
    assert top1_agreement(-reference, reference) == 0.0


# ---- perplexity


@pytest.mark.parametrize("vocab", [2, 31, 1000])
def test_perplexity_of_uniform_logits_is_the_vocabulary_size(vocab: int) -> None:
    targets = torch.arange(12) % vocab
    assert perplexity(torch.full((12, vocab), 3.5), targets) == pytest.approx(vocab, rel=1e-12)


def test_perplexity_is_the_inverse_geometric_mean_probability() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64)
    expected = 1 / math.sqrt(0.25 * 0.8)
    assert perplexity(probabilities.log(), torch.tensor([1, 2])) == pytest.approx(expected, rel=1e-12)


def test_perplexity_is_that_of_plain_sums() -> None:
    logits = random(20, 50, seed=3)
    targets = torch.arange(20, dtype=torch.int32) * 7 % 50
    values = [log_softmax(row)[int(t)] for row, t in zip(logits.tolist(), targets, strict=True)]
    assert perplexity(logits, targets) == pytest.approx(math.exp(-math.fsum(values) / 20), rel=1e-12)


def test_perplexity_of_impossible_and_of_hopeless_targets_is_infinite() -> None:
    assert perplexity(torch.tensor([[0.0, -math.inf]]), torch.tensor([1])) == math.inf
    assert perplexity(torch.tensor([[0.0, -5000.0]]), torch.tensor([1])) == math.inf


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([0, 1]), "targets are"),
        (torch.tensor([[0, 1, 2]]), "targets are"),
        (torch.tensor([0.0, 1.0, 2.0]), "targets are torch.float32"),
        (torch.tensor([0, 1, 4]), r"outside 0\.\.3"),
        (torch.tensor([0, -1, 2]), r"outside 0\.\.3"),
    ],
)
def test_perplexity_refuses_targets_that_do_not_fit(targets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        perplexity(torch.zeros(3, 4), targets)


# ---- common


def test_blocks_of_rows_give_the_result_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    test, reference, targets = random(10, 16, seed=4), random(10, 16, seed=5), torch.arange(10)
    whole = kl_divergence(test, reference), perplexity(test, targets)
    for elements in (1, 3 * 16):
        monkeypatch.setattr(metrics, "BLOCK_ELEMENTS", elements)
        blocks = kl_divergence(test, reference), perplexity(test, targets)
        assert blocks == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(8), r"\[8\] but must be floating point \[rows, vocab\]"),
        (torch.zeros(0, 8), "not empty"),
        (torch.zeros(2, 8, dtype=torch.int64), "int64"),
        (torch.tensor([[1.0, math.nan]]), "row with NaN"),
        (torch.tensor([[1.0, math.inf]]), "row with NaN, with"),
        (torch.full((1, 4), -math.inf), "nothing above -inf"),
    ],
)
def test_unusable_logits_are_refused_by_name(bad: torch.Tensor, message: str) -> None:
    good = torch.zeros(2, 8)
    for metric in (kl_divergence, top1_agreement):
        with pytest.raises(ValidationError, match=f"test .*{message}"):
            metric(bad, good)
        with pytest.raises(ValidationError, match=f"reference .*{message}"):
            metric(good, bad)
    with pytest.raises(ValidationError, match=f"logits .*{message}"):
        perplexity(bad, torch.zeros(len(bad), dtype=torch.int64))


def test_rows_of_different_shape_are_refused() -> None:
    for metric in (kl_divergence, top1_agreement):
        with pytest.raises(ValidationError, match=r"shapes differ: \[2, 8\] against \[2, 9\]"):
            metric(torch.zeros(2, 8), torch.zeros(2, 9))
