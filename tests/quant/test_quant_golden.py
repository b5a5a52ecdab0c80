"""Published byte vectors: length, first 24 bytes and sha256 prefix of every format that hipfire writes."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hipfire.base.qtypes import QType
from hipfire.kernels.fwht import fwht256
from hipfire.quant.registry import format_of

INDEX = torch.arange(704)
W = ((37 * INDEX[:256]) % 101 - 50).to(torch.float32) / 64
ROW_704 = ((29 * INDEX) % 97 - 48).to(torch.float32) / 32

VECTORS = [
    (
        QType.HFQ4G256,
        W,
        136,
        "5555d53d000048bf602bd7935e0ac6823df9b5612ce8945f",
        "2dd034682f402250ddb21d7bbe73c739",
    ),
    (
        QType.HFQ4G128,
        W[:128],
        72,
        "5555d53d000048bf602bd7935e0ac6823df9b5612ce8945f",
        "b409868d5a8a1ee735b04d21a3b7ae9c",
    ),
    (
        QType.HFQ6G256,
        W,
        200,
        "b32ccb3c000048bfc0f51a5edd90fba40a598c80b763f615",
        "e99d87a5623fe490e30aadc2a04f9df8",
    ),
    (
        QType.MQ4G256,
        W,
        136,
        "2222523e00e0b0bf967948417589569756895878779b6976",
        "4c7bd548bc1bfa12eeed37ffe24f17f9",
    ),
    (
        QType.MQ6G256,
        W,
        200,
        "8220483d00e0b0bf995976625444d7778218f59dd8458622",
        "37f9953eba9253e9e6dc3104f343f5bc",
    ),
    (
        QType.MQ4G256V2,
        W,
        136,
        "533085bc913287bdc79c4b4096ac57c967ab5a9a98ce7c97",
        "1f581bf25572be4dbfc40c2d90212329",
    ),
    (
        QType.MQ6G256V2,
        W,
        200,
        "1e2885bc412a87bdde1c93ec044cdb49a7dd85d2dcf6aaeb",
        "165302f4a16895b4490dba27ce27b910",
    ),
    (
        QType.Q8F16,
        W[:64],
        68,
        "4c1e81df3d9af856b41270cd2b89e745a2005ebb1977d533",
        "ac01903fbd49d6effc98ee8f11fc7ff5",
    ),
    (
        QType.HFQ4G128,
        ROW_704,
        432,
        "cdcc4c3e0000c0bf50e9831ca64fd9731ca64fd9731ca64f",
        "788f63a08db8abff5474c562d525fd8b",
    ),
]


@pytest.mark.parametrize(
    ("qtype", "weights", "length", "head", "digest"), VECTORS, ids=[f"{v[0].name}-{v[2]}" for v in VECTORS]
)
def test_encoder_gives_the_published_bytes(
    qtype: QType, weights: torch.Tensor, length: int, head: str, digest: str
) -> None:
    encode = format_of(qtype).encode
    assert encode is not None
    data = encode(weights.unsqueeze(0)).numpy().tobytes()
    assert len(data) == length
    assert data[:24].hex() == head
    assert hashlib.sha256(data).hexdigest()[:32] == digest


def test_rotation_gives_the_published_bytes() -> None:
    data = fwht256(W).numpy().tobytes()
    assert len(data) == 1024
    assert data[:24].hex() == "000027be0080fe3e0080e23e0000b83c0080993e004008bf"
    assert hashlib.sha256(data).hexdigest()[:32] == "b3f82b64a65823837622b9c857e1cd77"
