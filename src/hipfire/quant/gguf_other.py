"""The GGML types without a file of their own here, read through the `gguf` package.

That is slow and runs on the CPU only, which is enough to convert a model once. This file does not know
how any of these types is laid out.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hipfire.base.errors import UnsupportedError
from hipfire.base.qtypes import GGUF_BASE, Block
from hipfire.quant.blocks import check_size, check_whole
from hipfire.quant.format import WeightFormat

if TYPE_CHECKING:
    import gguf


def dequantize_other(ggml_type: int, data: Tensor, rows: int, cols: int) -> Tensor:
    """Decode uint8 [nbytes] of a GGML type into float32 [rows, cols] on the same device.

    Raises UnsupportedError naming a type that cannot be decoded, ArtifactError when the bytes do not fit
    the shape.
    """
    import gguf  # noqa: PLC0415  only models of unusual types pay for its import

    kind, block = _known(ggml_type)
    check_whole(kind.name, block, cols)
    check_size(kind.name, data, rows, cols, rows * (cols // block.elements) * block.nbytes)
    if not data.numel():
        return torch.zeros(rows, cols, dtype=torch.float32, device=data.device)
    by_row = data.cpu().contiguous().numpy().reshape(rows, -1)
    dense = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(by_row, kind), dtype=np.float32))
    return dense.view(rows, cols).to(data.device)


def other_format(ggml_type: int) -> WeightFormat:
    """Return the read-only format of a GGML type; UnsupportedError names a type that has no decoder."""
    kind, block = _known(ggml_type)
    decode = partial(dequantize_other, ggml_type)
    return WeightFormat(
        qtype=GGUF_BASE + ggml_type,
        name=f"GGUF_{kind.name}",
        rotated=False,
        block=block,
        encode=None,
        decode=decode,
        decode_dense=decode,
    )


@cache
def _known(ggml_type: int) -> tuple[gguf.GGMLQuantizationType, Block]:
    """Return a GGML type and its geometry once one block of zeros has shown that it can be decoded."""
    import gguf  # noqa: PLC0415  only models of unusual types pay for its import

    hint = "use a GGUF file of another quantization, such as Q8_0 or Q4_K_M"
    try:
        kind = gguf.GGMLQuantizationType(ggml_type)
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedError(f"GGML type {ggml_type} is not known", hint=hint) from error
    try:
        gguf.quants.dequantize(np.zeros((1, nbytes), dtype=np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedError(f"GGML type {kind.name} cannot be decoded", hint=hint) from error
    return kind, Block(elements, nbytes)
