"""Products with packed weights: exact sums in every layout, rounding of activations, equal bytes per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cpu_kit import launcher_of, padded, poisoned_memory, random_rows, raw_bytes, rounded_to_int8, row_errors
from panel_kit import code_range, make_panels, random_panels

from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.cpu.layouts import CODE_LAYOUTS, LAYOUTS, Layout
from hipfire.kernels.cpu.products import quantized
from hipfire.kernels.panels import PANEL_LINEAR, Panels, panel_linear_ref, panel_select_ref

CODE_NAMES = [layout.name for layout in CODE_LAYOUTS]


def product(x: torch.Tensor, panels: Panels, threads: int = 1) -> torch.Tensor:
    with poisoned_memory():
        result: torch.Tensor = launcher_of(threads).run(PANEL_LINEAR, x, panels)
    return result


def whole_panels(layout: Layout, codes: Any) -> tuple[Panels, Any]:
    """Panels of these codes with all scales 1 and whole numbers as minima."""
    groups = (len(codes), -(-codes.shape[1] // layout.group))
    minima = np.arange(groups[0] * groups[1]).reshape(groups) % 7 - 3 if layout.minimum else None
    return make_panels(layout, codes, np.ones(groups), minima)


@pytest.mark.parametrize("name", CODE_NAMES)
@pytest.mark.parametrize("kind", ["all highest", "all lowest", "in turn", "random"])
def test_sums_of_codes_are_exact_up_to_the_extremes(name: str, kind: str) -> None:
    layout, rows, cols = LAYOUTS[name], 33, 320
    assert isinstance(layout, Layout)
    low, high = code_range(layout)
    rng = np.random.default_rng(7)
    codes = {
        "all highest": np.full((rows, cols), high - 1),
        "all lowest": np.full((rows, cols), low),
        "in turn": np.where(np.arange(cols) % 2, low, high - 1) + np.zeros((rows, 1), np.int64),
        "random": rng.integers(low, high, (rows, cols)),
    }[kind]
    panels, weights = whole_panels(layout, codes)
    # every group of 32 has a peak of 127, so the activations are their own codes
    x = np.stack([np.full(cols, 127), np.full(cols, -127), np.where(np.arange(cols) % 2, 127, -127),
                  np.where(np.arange(cols) % 2, -127, 127), rng.integers(-127, 128, cols)])  # fmt: skip
    x[4, ::32] = 127
    for first in range(5):
        # seven rows, so that every kind of row stands once in a tile, in a small one and alone
        rows = x[(np.arange(7) + first) % 5]
        y = product(torch.from_numpy(rows.astype(np.float32)), panels)
        assert np.array_equal(y.double().numpy(), rows @ weights.T)


@pytest.mark.parametrize("name", CODE_NAMES)
def test_single_codes_stand_in_their_own_row_and_column(name: str) -> None:
    layout, cols = LAYOUTS[name], 288
    assert isinstance(layout, Layout)
    rng = np.random.default_rng(8)
    panels, weights = whole_panels(layout, rng.integers(*code_range(layout), (17, cols)))
    x = np.zeros((cols, cols), np.float32)
    np.fill_diagonal(x, 127.0)
    assert np.array_equal(product(torch.from_numpy(x), panels).double().numpy(), 127.0 * weights.T)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_has_the_same_bytes_in_every_batch(name: str) -> None:
    # 300 rows of 1280 columns are more than stay in the cache at once
    panels, _ = random_panels(name, 50, 1280)
    x = random_rows(300, 1280, seed=4)
    together = product(x, panels)
    for count in range(1, 10):
        for first in (0, 100, 291):
            part = product(x[first : first + count], panels)
            assert raw_bytes(part) == raw_bytes(together[first : first + count]), (count, first)
    for threads in (2, 3):
        assert raw_bytes(product(x, panels, threads)) == raw_bytes(together)
    assert raw_bytes(product(x, panels)) == raw_bytes(together)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_without_size_and_of_extreme_size(name: str) -> None:
    panels, weights = random_panels(name, 33, 100)
    x = random_rows(6, 100, seed=9)
    x[0] = 0.0
    x[1] *= 1e30
    x[2] *= 1e-38
    x[3, :32] = 0.0
    x[4, 50] = 3e30
    y = product(x, panels).double().numpy()
    assert np.isfinite(y).all()
    assert not y[0].any()
    assert np.abs(y[2]).max() < 1e-34
    seen = x.double().numpy() if name in ("f32", "f16", "bf16") else rounded_to_int8(x)[2]
    rows = [1, 3, 4, 5]
    size = np.sqrt((seen[rows] ** 2 @ weights.T**2).mean(1))
    assert row_errors(y[rows], seen[rows] @ weights.T, size).max() < 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reference_decodes_the_same_weights(name: str) -> None:
    for rows, cols in ((1, 7), (17, 40), (33, 320), (40, 576)):
        panels, weights = random_panels(name, rows, cols)
        assert row_errors(panels.dense().double().numpy(), weights).max() < 3e-7
        numbers = torch.tensor([rows - 1, 0, rows // 2])
        assert torch.equal(panel_select_ref(panels, numbers), panels.dense()[numbers])
        x = random_rows(3, cols, seed=1)
        size = np.sqrt((x.double().numpy() ** 2 @ weights.T**2).mean(1))
        want = x.double().numpy() @ weights.T
        assert row_errors(panel_linear_ref(x, panels).double().numpy(), want, size).max() < 1e-6


def test_rounding_of_activations_costs_about_half_a_percent() -> None:
    panels, weights = random_panels("u4g32", 100, 576)
    x = random_rows(17, 576, seed=2)
    want = x.double().numpy() @ weights.T
    errors = row_errors(product(x, panels).double().numpy(), want)
    assert 1e-3 < errors.max() < 1e-2


def numbers_of(x: torch.Tensor, threads: int = 1) -> tuple[Any, Any]:
    with poisoned_memory():
        codes, numbers = quantized(CpuEngine(threads), x)
    return codes.numpy(), numbers.numpy()


@pytest.mark.parametrize("columns", [7, 20, 32, 40, 64, 576])
def test_activations_are_rounded_as_documented(columns: int) -> None:
    for rows in (1, 3, 17):
        x = random_rows(rows, columns, seed=columns) * 3.0 ** torch.arange(rows)[:, None]
        x[0, ::5] = 0.0
        for view in (x, padded(x, 13)):
            for threads in (1, 2, 3):
                codes, numbers = numbers_of(view, threads)
                want, scale, _ = rounded_to_int8(x)
                sums = want.reshape(rows, -1, 2, 16).sum(-1, dtype=np.int32)
                assert np.array_equal(codes, want)
                assert np.array_equal(numbers[..., 0], scale)
                assert np.array_equal(numbers.view(np.int32)[..., 2:], sums)
                assert np.array_equal(
                    numbers[..., 1], scale * sums.sum(-1, dtype=np.int32).astype(np.float32)
                )


def test_ties_go_to_even_codes_and_small_groups_are_zeros() -> None:
    x = torch.zeros(4, 64)
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    x[1, 40:43] = torch.tensor([-127.0, 3.5, -4.5])
    x[2] = 1e-31
    x[3] = 2e-30
    codes, numbers = numbers_of(x)
    assert codes[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert codes[1, 40:43].tolist() == [-127, 4, -4]
    assert not codes[2].any()
    assert not numbers[2].any()
    assert (codes[3] == 127).all()
    # the last group of a ragged row is rounded by another loop
    ragged, _ = numbers_of(x[:, :43].contiguous())
    assert np.array_equal(ragged[:, :43], codes[:, :43])
