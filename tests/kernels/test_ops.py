"""Every operation's reference against an independent float64 computation; cache writes over poison."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helpers import rms
from hipfire.kernels.attention import QUERY_ROWS, attend_q8_ref, attend_ref, attention_ref
from hipfire.kernels.elementwise import (
    add_ref,
    gather_rows_ref,
    gelu_tanh_mul_ref,
    scale_ref,
    silu_mul_ref,
    softcap_ref,
)
from hipfire.kernels.kv_cache import (
    kv_write_q8_ref,
    kv_write_ref,
    q8_decode,
    q8_encode,
    runs,
)
from hipfire.kernels.linear import linear_ref
from hipfire.kernels.rms_norm import rms_norm_ref
from hipfire.kernels.rope import rope_angles_ref, rope_ref


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 7, 576, 2112])
def test_rms_norm(width: int, offset: float) -> None:
    x, weight = random(3, 2, width), random(width, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    assert rms(rms_norm_ref(x, weight, 1e-5, offset), expected) < 1e-6


def test_rms_norm_of_large_values_in_half_precision_stays_finite() -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    assert torch.allclose(rms_norm_ref(x, torch.ones(64), 1e-6), torch.ones(1, 64))


@pytest.mark.parametrize(("head_dim", "dims"), [(8, 8), (64, 64), (12, 8)])
def test_rope_rotates_pairs_by_position_times_frequency(head_dim: int, dims: int) -> None:
    positions = torch.tensor([0, 1, 5, 4095])
    rows = torch.stack((torch.tensor([3, 0, 0, 1]), positions), dim=1)
    inverse = 1000.0 ** -(torch.arange(0, dims, 2).float() / dims)
    cos, sin = rope_angles_ref(rows, inverse)
    x = random(4, 3, head_dim)
    got = rope_ref(x, cos, sin).double()
    for t, position in enumerate(positions.tolist()):
        for i in range(dims // 2):
            angle = position * float(inverse[i])
            pair = torch.view_as_complex(x[t][:, [i, i + dims // 2]].double().contiguous())
            turned = pair * complex(math.cos(angle), math.sin(angle))
            # float32 angles of some thousand radians are good to about 2e-4
            assert rms(got[t][:, i], turned.real) < 1e-3
            assert rms(got[t][:, i + dims // 2], turned.imag) < 1e-3
    assert torch.equal(got[..., dims:], x[..., dims:].double())
    assert torch.equal(got[0], x[0].double())


def naive_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None
) -> np.ndarray:
    T, H, D = q.shape
    S, kv_heads, _ = k.shape
    out = np.full((T, H, D), np.nan)
    for t in range(T):
        position = S - T + t
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(H):
            group = h // (H // kv_heads)
            scores = k[first : position + 1, group] @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[first : position + 1, group]
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 40), (7, 7), (13, 50)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_attention(T: int, S: int, heads: int, kv_heads: int, window: int | None) -> None:
    q, k, v = random(T, heads, 10), random(S, kv_heads, 10, seed=1), random(S, kv_heads, 10, seed=2)
    got = attention_ref(q, k, v, 0.3, window)
    expected = naive_attention(q.double().numpy(), k.double().numpy(), v.double().numpy(), 0.3, window)
    assert rms(got, torch.from_numpy(expected)) < 1e-6


@pytest.mark.parametrize("window", [None, 100])
def test_attention_over_several_blocks_of_queries(window: int | None) -> None:
    T, S = QUERY_ROWS + 3, QUERY_ROWS + 40
    q, k, v = random(T, 2, 4), random(S, 1, 4, seed=1), random(S, 1, 4, seed=2)
    expected = naive_attention(q.double().numpy(), k.double().numpy(), v.double().numpy(), 0.5, window)
    assert rms(attention_ref(q, k, v, 0.5, window), torch.from_numpy(expected)) < 1e-6


def test_activations() -> None:
    gate, up = random(3, 50) * 4, random(3, 50, seed=1)
    wide = gate.double()
    silu = wide / (1 + torch.exp(-wide)) * up.double()
    gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) * up.double()
    assert rms(silu_mul_ref(gate, up), silu) < 1e-6
    assert rms(gelu_tanh_mul_ref(gate, up), gelu) < 1e-6
    assert rms(softcap_ref(gate, 3.0), 3.0 * torch.tanh(wide / 3.0)) < 1e-6


def test_sums_scales_and_gathers_widen_to_float() -> None:
    x, y = random(3, 50).half(), random(3, 50, seed=1).bfloat16()
    assert torch.equal(add_ref(x, y), (x.double() + y.double()).float())
    assert torch.equal(scale_ref(x, 3.0), (x.double() * 3).float())
    table = random(6, 4)
    assert torch.equal(gather_rows_ref(table, torch.tensor([5, 0, 5])), table[[5, 0, 5]])


@pytest.mark.parametrize("K", [1, 576, 704])
def test_linear(K: int) -> None:
    x, weight = random(3, K), random(5, K, seed=1)
    assert rms(linear_ref(x, weight), x.double() @ weight.double().T) < 1e-6


def slow_q8(values: np.ndarray) -> bytes:
    """One 32-element block by the definition, element by element."""
    peak = np.float32(np.abs(values).max())
    scale = np.float16(np.float32(peak / np.float32(127.0)))
    inverse = np.float32(np.float32(127.0) / peak) if peak > 0 else np.float32(0)
    codes = [int(np.clip(np.rint(np.float32(value * inverse)), -127, 127)) for value in values]
    return scale.tobytes() + np.array(codes, dtype=np.int8).tobytes()


def test_q8_cache_blocks_are_exact() -> None:
    x = random(5, 2, 96).numpy() * np.float32(3.0)
    x[0, 0, :32] = 0.0
    x[1, 1, 40] = 900.0
    packed = q8_encode(torch.from_numpy(x))
    assert packed.shape == (5, 2, 3 * 34)
    expected = b"".join(slow_q8(block) for block in x.reshape(-1, 32))
    assert packed.numpy().tobytes() == expected
    blocks = torch.from_numpy(x).reshape(-1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    # half a step for the code, and the half-precision scale's own rounding over up to 127 steps
    assert ((q8_decode(packed).reshape(-1, 32) - blocks).abs() <= step * (0.5 + 127 * 2**-11)).all()
    assert torch.equal(q8_decode(packed)[0, 0, :32], torch.zeros(32))


def test_q8_of_tiny_values_is_zero_not_nan() -> None:
    assert torch.equal(q8_decode(q8_encode(torch.full((1, 32), 1e-40))), torch.zeros(1, 32))


def test_writes_touch_their_rows_only() -> None:
    x, rows = random(3, 1, 32), torch.tensor([[1, 3], [1, 4], [0, 0]])
    plain = torch.full((2, 6, 1, 32), float("nan"), dtype=torch.bfloat16)
    kv_write_ref(plain, rows, x)
    packed = torch.full((2, 6, 1, 34), 171, dtype=torch.uint8)
    kv_write_q8_ref(packed, rows, x)
    touched = torch.zeros(2, 6, dtype=torch.bool)
    for token, (slot, position) in enumerate(rows.tolist()):
        touched[slot, position] = True
        assert torch.equal(plain[slot, position], x[token].bfloat16())
        assert torch.equal(packed[slot, position], q8_encode(x[token]))
    assert plain[~touched].isnan().all()
    assert (packed[~touched] == 171).all()


def test_rows_are_cut_into_runs_of_one_sequence() -> None:
    rows = torch.tensor([[0, 5], [0, 6], [2, 7], [2, 0], [2, 1], [0, 2]])
    assert list(runs(rows)) == [
        (slice(0, 2), 0, 5),
        (slice(2, 3), 2, 7),
        (slice(3, 5), 2, 0),
        (slice(5, 6), 0, 2),
    ]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_caches_finds_every_sequence(window: int | None, packed: bool) -> None:
    keys, values = random(3, 20, 2, 32), random(3, 20, 2, 32, seed=1)
    rows = torch.tensor([[2, 7], [2, 8], [2, 9], [0, 0], [1, 19]])
    q = random(5, 4, 32, seed=2)
    if packed:
        stored = q8_encode(keys), q8_encode(values)
        got = attend_q8_ref(q, *stored, rows, 0.2, window)
        keys, values = (q8_decode(cache) for cache in stored)
    else:
        got = attend_ref(q, keys, values, rows, 0.2, window)
    for token, (slot, position) in enumerate(rows.tolist()):
        seen = slice(0, position + 1)
        arrays = (x.double().numpy() for x in (q[token : token + 1], keys[slot, seen], values[slot, seen]))
        expected = naive_attention(*arrays, 0.2, window)
        assert rms(got[token : token + 1], torch.from_numpy(expected)) < 1e-6
