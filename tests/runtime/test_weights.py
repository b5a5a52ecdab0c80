"""Weights out of checkpoints: formats, row orders, residency, and damage."""

from __future__ import annotations

import struct

import pytest
import torch

from helpers import MemoryCheckpoint, rms
from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.checkpoint.names import DECODER_RULES, NamedCheckpoint, NameRule, override_rules
from hipfire.kernels.fwht import inverse_fwht256
from hipfire.kernels.launch import Launcher
from hipfire.layers.weights import rope_row_order
from hipfire.runtime.weights import CheckpointWeights, Residency

NAME = "model.layers.0.mlp.up_proj.weight"
Q_NAME, K_NAME = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
RULES = override_rules(
    DECODER_RULES,
    NameRule(Q_NAME, "blk.0.attn_q.weight", "q_rows"),
    NameRule(K_NAME, "blk.0.attn_k.weight", "k_rows"),
    NameRule("model.norm.weight", "output_norm.weight", "minus_one"),
)


def source(
    checkpoint: MemoryCheckpoint, residency: Residency = "decoded", heads: int = 8, kv: int = 2
) -> CheckpointWeights:
    return CheckpointWeights(
        NamedCheckpoint(checkpoint, RULES, 1), heads=heads, kv_heads=kv, residency=residency
    )


@pytest.mark.parametrize("residency", ["decoded", "packed"])
@pytest.mark.parametrize(
    ("qtype", "bound"),
    [
        (QType.F32, 0.0),
        (QType.F16, 1e-3),
        (QType.BF16, 5e-3),
        (QType.Q8F16, 2e-2),
        (QType.HFQ6G256, 3e-2),
        (QType.MQ6G256, 3e-2),
        (QType.MQ6G256V2, 3e-2),
        (QType.HFQ4G256, 0.15),
        (QType.HFQ4G128, 0.15),
        (QType.MQ4G256, 0.15),
        (QType.MQ4G256V2, 0.15),
    ],
)
def test_every_format_gives_products_and_rows_near_the_original(
    qtype: QType, bound: float, residency: Residency
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(24, 512)
    checkpoint = MemoryCheckpoint()
    checkpoint.add(NAME, weight, qtype)
    held = source(checkpoint, residency).matrix(NAME, 24, 512)
    launcher = Launcher()
    assert (held.resident is None) == (residency == "packed")
    stored = held.matrix(launcher)
    dense = inverse_fwht256(stored) if held.format.rotated else stored
    assert rms(dense, weight) <= bound
    ids = torch.tensor([23, 0, 23])
    assert torch.equal(held.select(launcher, ids), dense[ids])


def test_packed_and_decoded_hold_the_same_numbers() -> None:
    torch.manual_seed(2)
    checkpoint = MemoryCheckpoint()
    checkpoint.add(NAME, torch.randn(7, 576), QType.HFQ4G128)
    launcher = Launcher()
    arms = [source(checkpoint, residency).matrix(NAME, 7, 576) for residency in ("decoded", "packed")]
    assert torch.equal(arms[0].matrix(launcher), arms[1].matrix(launcher))


@pytest.mark.parametrize(("heads", "kv"), [(8, 2), (8, 8), (8, 1)])
@pytest.mark.parametrize("qtype", [QType.F32, QType.Q8F16])
def test_rotary_rows_are_put_in_half_split_order(heads: int, kv: int, qtype: QType) -> None:
    torch.manual_seed(3)
    head_dim, cols = 12, 64
    checkpoint = MemoryCheckpoint("gguf")
    originals = {}
    for name, stored, count in ((Q_NAME, "blk.0.attn_q.weight", heads), (K_NAME, "blk.0.attn_k.weight", kv)):
        weight = torch.randn(count * head_dim, cols)
        # row 2 j + p of a head in the file is row j + p * head_dim / 2 of the original
        interleaved = torch.empty_like(weight)
        for head in range(count):
            for j in range(head_dim // 2):
                for p in range(2):
                    interleaved[head * head_dim + 2 * j + p] = weight[head * head_dim + j + p * head_dim // 2]
        checkpoint.add(stored, interleaved, qtype)
        originals[name] = weight
    weights = source(checkpoint, heads=heads, kv=kv)
    for name, weight in originals.items():
        got = weights.matrix(name, *weight.shape).matrix(Launcher())
        assert rms(got, weight) <= (0.0 if qtype == QType.F32 else 0.01)


def test_row_order_is_a_permutation_within_heads() -> None:
    order = rope_row_order(24, 2)
    assert sorted(order.tolist()) == list(range(24))
    assert set(order[:12].tolist()) == set(range(12))


def test_norms_stored_plus_one_lose_it() -> None:
    checkpoint = MemoryCheckpoint("gguf")
    checkpoint.add("output_norm.weight", torch.tensor([1.5, 0.25, -3.0]))
    assert torch.equal(source(checkpoint).vector("model.norm.weight", 3), torch.tensor([0.5, -0.75, -4.0]))


def test_old_flat_packing_is_decoded_as_a_whole() -> None:
    # two rows of 192 in groups of 128: the second group runs over the row end
    blocks = [(0.5, -1.0), (0.25, 2.0), (1.0, 0.0)]
    data = b"".join(struct.pack("<ff", scale, low) + bytes([0x21] * 64) for scale, low in blocks)
    checkpoint = MemoryCheckpoint("hfq")
    checkpoint.add_raw(NAME, QType.HFQ4G128, (2, 192), data)
    got = source(checkpoint, "packed").matrix(NAME, 2, 192)
    flat = torch.cat([torch.tensor([low + scale, low + 2 * scale] * 64) for scale, low in blocks])[:384]
    assert torch.equal(got.matrix(Launcher()), flat.view(2, 192))
    assert torch.equal(got.select(Launcher(), torch.tensor([1])), flat.view(2, 192)[1:])


@pytest.mark.parametrize("residency", ["decoded", "packed"])
def test_a_scale_that_is_not_finite_is_refused_by_tensor_row_and_block(residency: Residency) -> None:
    good = struct.pack("<e", 1.0) + bytes(32)
    bad = struct.pack("<e", float("inf")) + bytes([1] * 32)
    checkpoint = MemoryCheckpoint("gguf")
    checkpoint.add_raw("blk.0.ffn_up.weight", QType.GGUF_Q8_0, (3, 64), good * 5 + bad)
    with pytest.raises(ArtifactError, match=r"blk.0.ffn_up.weight.*row 2, block 1"):
        source(checkpoint, residency).matrix(NAME, 3, 64)


def test_missing_and_misshapen_tensors_are_named_with_both_shapes() -> None:
    checkpoint = MemoryCheckpoint()
    checkpoint.add(NAME, torch.ones(4, 6))
    with pytest.raises(ArtifactError, match=r"has shape \[4, 6\] but the model needs \[4, 8\]"):
        source(checkpoint).matrix(NAME, 4, 8)
    with pytest.raises(ArtifactError, match="down_proj"):
        source(checkpoint).matrix("model.layers.0.mlp.down_proj.weight", 4, 8)


def test_bytes_that_do_not_fit_the_shape_name_tensor_and_file() -> None:
    checkpoint = MemoryCheckpoint("hfq")
    checkpoint.add_raw(NAME, QType.MQ4G256V2, (4, 256), bytes(408))
    with pytest.raises(ArtifactError, match=r"memory: tensor model\.layers\.0.*544.*408"):
        source(checkpoint).matrix(NAME, 4, 256)


def test_a_type_that_nothing_decodes_is_refused() -> None:
    checkpoint = MemoryCheckpoint("hfq")
    checkpoint.add_raw(NAME, 29, (2, 2), bytes(4))
    with pytest.raises(UnsupportedError, match="29"):
        source(checkpoint).matrix(NAME, 2, 2)
