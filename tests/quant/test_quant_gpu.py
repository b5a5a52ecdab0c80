"""A GPU writes the same bytes and reads the same bits as the CPU."""

from __future__ import annotations

import pytest
import torch
from test_quant_encode import groups_of_every_kind

from hipfire.kernels.fwht import fwht256, inverse_fwht256
from hipfire.quant.format import WeightFormat
from hipfire.quant.registry import all_formats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def weights(cols: int) -> torch.Tensor:
    """Groups of every kind, then enough rows for several chunks: float32 [5018, cols]."""
    many = torch.randn(5000, cols, generator=torch.Generator().manual_seed(41))
    return torch.cat((torch.from_numpy(groups_of_every_kind(cols)), many))


@pytest.mark.parametrize("found", all_formats(), ids=lambda found: found.name)
@pytest.mark.parametrize("cols", [4096, 704])
def test_bytes_and_bits_do_not_depend_on_the_device(found: WeightFormat, cols: int) -> None:
    if found.encode is None:
        cols = 4096
        data = torch.arange(found.nbytes(64, cols), dtype=torch.int32).remainder(119).to(torch.uint8)
        rows = 64
    else:
        cols = 4096 if found.rotated else cols
        source = weights(cols)
        rows = source.shape[0]
        data = found.encode(source)
        assert torch.equal(found.encode(source.cuda()).cpu(), data)
    for read in (found.decode, found.dense):
        got = read(data.cuda(), rows, cols).cpu()
        assert torch.equal(got.view(torch.int32), read(data, rows, cols).view(torch.int32))


def test_rotation_does_not_depend_on_the_device() -> None:
    x = weights(1024)
    for rotate in (fwht256, inverse_fwht256):
        assert torch.equal(rotate(x.cuda()).cpu().view(torch.int32), rotate(x).view(torch.int32))
