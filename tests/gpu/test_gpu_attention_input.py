"""What happens before attention: norms, rotation and cache writes of the kernels, against the references.

Caches are NaN or a pattern at first: what is written is compared, and no other byte may have changed.
"""

from __future__ import annotations

import pytest
import torch
from gpu_kit import DEVICE, Poisoned, engine, relative_rms

from hipfire.kernels.block_cache import (
    BLOCK,
    block_input_q8_ref,
    block_input_ref,
    q8_row_decode,
    q8_row_encode,
    q8_row_nbytes,
)
from hipfire.kernels.gpu import attention_input, rowwise
from hipfire.kernels.gpu.attention_input import block_input, block_input_kernel, block_input_q8
from hipfire.kernels.gpu.rope import angles_kernel, rope_angles
from hipfire.kernels.gpu.target import INTERPRETED
from hipfire.kernels.rope import rope_angles_ref

KERNELS = (block_input_kernel, angles_kernel)
# interpreted kernels cut off what bfloat16 has no room for, others round
BF16 = 5e-3 if INTERPRETED else 5e-4
ROWS = [(2, 0), (0, 255), (0, 256), (2, 1), (1, 511)]


def _cache(mode: str, kv: int, d: int) -> torch.Tensor:
    width = q8_row_nbytes(kv * d) if mode == "q8" else kv * d
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "q8": torch.uint8}[mode]
    memory = torch.full((4, 2, 3, BLOCK, width), 255 if mode == "q8" else float("nan"), dtype=dtype)
    return memory.to(DEVICE)


def _run(
    mode: str,
    heads: int,
    kv: int,
    d: int,
    *,
    turned: int | None = None,
    norms: bool = True,
    dtype: torch.dtype = torch.float32,
    rows: list[tuple[int, int]] = ROWS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check one case and return v, the rows that were written of it, and the queries."""
    torch.manual_seed(heads + d)
    tokens = len(rows)
    joined = torch.randn(tokens, (heads + 2 * kv) * d + 8, device=DEVICE).to(dtype)
    q, k, v = joined[:, : (heads + 2 * kv) * d].split((heads * d, kv * d, kv * d), dim=1)
    q, k, v = q.unflatten(1, (heads, d)), k.unflatten(1, (kv, d)), v.unflatten(1, (kv, d))
    angles = torch.rand(tokens, (turned or d) // 2, device=DEVICE) * 6
    places = torch.tensor(rows, device=DEVICE)
    weights = [torch.randn(d, device=DEVICE) if norms else None for _ in range(2)]
    memories = [_cache(mode, kv, d) for _ in range(4)]
    keys, values, wanted_keys, wanted_values = (memory[:, :, 1] for memory in memories)
    scratch = Poisoned()
    run, reference = (block_input_q8, block_input_q8_ref) if mode == "q8" else (block_input, block_input_ref)
    rest = (places, angles.cos(), angles.sin())
    result = run(engine(scratch=scratch), q, k, v, *rest, keys, values, *weights, 1e-5, 1.0)
    scratch.check_guards()
    wanted = reference(q, k, v, *rest, wanted_keys, wanted_values, *weights, 1e-5, 1.0)
    assert relative_rms(result, wanted) < (1e-6 if result.dtype == torch.float32 else 5e-3)
    place = (places[:, 0], places[:, 1] // BLOCK, places[:, 1] % BLOCK)
    got, expected = keys[place], wanted_keys[place]
    if mode == "q8":
        got, expected = q8_row_decode(got), q8_row_decode(expected)
    # the last digit of a rotated key may round the other way
    assert relative_rms(got, expected) < {"f32": 1e-6, "bf16": BF16, "q8": 5e-4}[mode]
    written = values[place].clone()
    if mode == "bf16" and INTERPRETED:
        assert relative_rms(written, wanted_values[place]) < BF16
    else:
        assert torch.equal(written, wanted_values[place])
    filler = 255 if mode == "q8" else float("nan")
    for cache in (keys, values):
        cache[place] = filler
    untouched = _cache(mode, kv, d).view(torch.uint8)
    assert all(torch.equal(memory.view(torch.uint8), untouched) for memory in memories[:2])
    return v, written, result


@pytest.mark.parametrize("mode", ["f32", "bf16", "q8"])
def test_norm_rotate_and_write(mode: str) -> None:
    _run(mode, 4, 2, 64)


@pytest.mark.parametrize(("mode", "d"), [("bf16", 80), ("q8", 96), ("q8", 128), ("bf16", 256), ("q8", 512)])
def test_head_dimensions(mode: str, d: int) -> None:
    _run(mode, 3, 1, d, rows=ROWS[:2])


@pytest.mark.parametrize("mode", ["f32", "q8"])
def test_no_norms_and_a_part_that_is_not_rotated(mode: str) -> None:
    _run(mode, 2, 1, 64, norms=False, turned=32)


def test_inputs_of_bfloat16() -> None:
    _run("q8", 2, 1, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", ["bf16", "q8"])
def test_many_tokens_share_programs_among_heads(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_input, "_FEW_TOKENS", 2)
    _run(mode, 19, 1, 64, rows=ROWS[:3])


def test_large_steps_return_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "ROWS_FLOAT32", 2)
    _, _, result = _run("q8", 1, 1, 64, rows=ROWS[:3])
    assert result.dtype == torch.bfloat16


def test_exact_engines_keep_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "ROWS_FLOAT32", 2)
    tokens = 3
    x = torch.randn(tokens, 1, 64, device=DEVICE)
    rows = torch.stack((torch.zeros(tokens), torch.arange(tokens)), dim=1).long().to(DEVICE)
    flat = torch.ones(tokens, 32, device=DEVICE)
    caches = [_cache("f32", 1, 64)[:, :, 1] for _ in range(2)]
    result = block_input(engine("float"), x, x, x, rows, flat, flat * 0, *caches)
    assert result.dtype == torch.float32
    assert torch.equal(result, x)


def test_codes_of_values_are_those_of_the_reference() -> None:
    v, written, _ = _run("q8", 1, 2, 96)
    assert torch.equal(written, q8_row_encode(v))


def test_values_too_small_for_a_scale_become_zero() -> None:
    x = torch.zeros(1, 1, 64, device=DEVICE)
    x[..., 3] = 1e-35
    rows = torch.tensor([[0, 0]], device=DEVICE)
    flat = torch.ones(1, 32, device=DEVICE)
    keys, values = (_cache("q8", 1, 64)[:, :, 1] for _ in range(2))
    block_input_q8(engine(), x, x, x, rows, flat, flat * 0, keys, values)
    assert (values[0, 0, 0] == 0).all()
    assert (keys[0, 0, 0] == 0).all()


def test_slots_beyond_32_bits() -> None:
    width = q8_row_nbytes(64)
    stride = 2**31 + 4096
    memory = torch.empty(stride + 2 * BLOCK * width, dtype=torch.uint8, device=DEVICE)
    far = memory.as_strided((2, 2, BLOCK, width), (stride, BLOCK * width, width, 1))
    x = torch.randn(1, 1, 64, device=DEVICE)
    rows = torch.tensor([[1, 300]], device=DEVICE)
    flat = torch.ones(1, 32, device=DEVICE)
    keys = _cache("q8", 1, 64)[:, :, 1]
    block_input_q8(engine(), x, x, x, rows, flat, flat * 0, keys, far)
    assert torch.equal(far[1, 1, 44], q8_row_encode(x)[0])


@pytest.mark.parametrize("half", [1, 20, 64])
def test_angles(half: int) -> None:
    positions = [0, 1, 2, 1000, 16384, 131071, 262143]
    rows = torch.tensor([[5, position] for position in positions], device=DEVICE)
    frequencies = (10000.0 ** -(torch.arange(half) / half)).to(DEVICE)
    scratch = Poisoned()
    results = rope_angles(engine(scratch=scratch), rows, frequencies, 1.25)
    scratch.check_guards()
    exact = (rows[:, 1].float()[:, None] * frequencies[None, :]).double()
    for result, wanted, reference in zip(
        results, (exact.cos(), exact.sin()), rope_angles_ref(rows, frequencies, 1.25), strict=True
    ):
        assert (result.double() - 1.25 * wanted).abs().max() < 3e-7
        assert (result - reference).abs().max() < 1e-6
