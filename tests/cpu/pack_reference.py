"""Sources for packing in every format, and a plain reading of the panels that packing makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hipfire.base.qtypes import QType
from hipfire.kernels.cpu.layouts import DenseLayout, Layout
from hipfire.kernels.cpu.pack import PACKERS
from hipfire.quant.registry import format_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# where the numbers of a block are, by the kind of number
HALVES = {
    "Q8F16": (0,),
    "MQ4G256V2": (0, 2, 4, 6),
    "MQ6G256V2": (0, 2, 4, 6),
    "GGUF_Q8_0": (0,),
    "GGUF_Q4_0": (0,),
    "GGUF_Q4_1": (0, 2),
    "GGUF_Q5_0": (0,),
    "GGUF_Q4_K": (0, 2),
    "GGUF_Q5_K": (0, 2),
    "GGUF_Q6_K": (208,),
    "F16": (0,),
    "GGUF_F16": (0,),
}
FLOATS = {
    **dict.fromkeys(("HFQ4G128", "HFQ4G256", "HFQ6G256", "MQ4G256", "MQ6G256"), (0, 4)),
    **dict.fromkeys(("F32", "GGUF_F32"), (0,)),
}
BFLOATS = {"BF16": (0,), "GGUF_BF16": (0,)}
PRODUCTS = ("GGUF_Q4_K", "GGUF_Q5_K", "GGUF_Q6_K")


def number_places(name: str) -> list[tuple[int, Bytes]]:
    """Offset of each number in a block, with the bytes of an infinity of its kind."""
    kinds = ((HALVES, 0x7C00, "<u2"), (FLOATS, 0x7F800000, "<u4"), (BFLOATS, 0x7F80, "<u2"))
    return [
        (offset, np.array([bits], dtype).view(np.uint8))
        for table, bits, dtype in kinds
        for offset in table.get(name, ())
    ]


def make_source(name: str, rows: int, cols: int) -> Bytes:
    """Encoded normal weights; for formats without an encoder random codes with numbers of common size."""
    rng = np.random.default_rng(rows * 10007 + cols)
    found = format_of(QType[name])
    twin = format_of(QType[name.removeprefix("GGUF_")]) if name.removeprefix("GGUF_") in PACKERS else found
    if twin.encode is not None:
        weights = torch.from_numpy(rng.standard_normal((rows, cols), dtype=np.float32))
        source: Bytes = twin.encode(weights).numpy().copy()
        return source
    data = rng.integers(0, 256, (found.nbytes(rows, cols) // found.group_bytes, found.group_bytes), np.uint8)
    for offset in HALVES[name]:
        numbers = rng.uniform(1e-4, 1e-2, len(data)) * rng.choice((-1.0, 1.0), len(data))
        data[:, offset : offset + 2] = numbers.astype("<f2").view(np.uint8).reshape(-1, 2)
    return data.reshape(-1)


def read_codes(layout: Layout, run: Bytes) -> Any:
    """Codes of a run of 32 columns: [16, 32]."""
    if layout.bits == 8:
        words = run.view(np.int8).reshape(8, 16, 4).astype(np.int32)
    else:
        low = run[:256].reshape(4, 1, 16, 4)
        words = np.concatenate((low & 15, low >> 4), axis=1).reshape(8, 16, 4).astype(np.int32)
        extra = layout.bits - 4
        if extra:
            planes = run[256:].reshape(-1, 1, 16, 4)
            places = extra * np.arange(8 // extra).reshape(1, -1, 1, 1)
            words |= ((planes >> places) & ((1 << extra) - 1)).reshape(8, 16, 4) << 4
    return words.transpose(1, 0, 2).reshape(16, 32)


def read_panels(layout: Layout | DenseLayout, panels: Bytes, rows: int, cols: int) -> tuple[Any, Any]:
    """Weights float64 and raw codes (or values), both with all filled-up rows and columns."""
    count = -(-rows // 16)
    if isinstance(layout, DenseLayout):
        kind = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[layout.name]
        raw = panels.view(kind).reshape(count, cols, 16).transpose(0, 2, 1).reshape(-1, cols)
        value = (raw.astype(np.uint32) << 16).view(np.float32) if layout.name == "bf16" else raw
        return value.astype(np.float64), value
    runs = -(-cols // 32)
    weights, codes = np.zeros((count, 16, runs * 32)), np.zeros((count, 16, runs * 32), np.int32)
    stream = panels.reshape(count, -1)
    kind = "<f2" if layout.half else "<f4"
    for p in range(count):
        place = 0
        for run in range(runs):
            if run % layout.subs == 0:
                header = stream[p, place : place + layout.header_bytes].view(kind).reshape(-1, 16, 1)
                scale, minimum = header[: layout.parts].astype(np.float64), header[layout.parts :]
                place += layout.header_bytes
            q = read_codes(layout, stream[p, place : place + layout.sub_bytes])
            place += layout.sub_bytes
            columns = slice(32 * run, 32 * run + 32)
            codes[p, :, columns] = q
            steps = np.concatenate([np.repeat(part, 32 // layout.parts, 1) for part in scale], axis=1)
            weights[p, :, columns] = steps * (q - layout.offset)
            if layout.minimum:
                weights[p, :, columns] += minimum[0].astype(np.float64)
        assert place == stream.shape[1]
    return weights.reshape(-1, runs * 32), codes.reshape(-1, runs * 32)


def decoded(name: str, source: Bytes, rows: int, cols: int) -> Any:
    return format_of(QType[name]).decode(torch.from_numpy(source), rows, cols).double().numpy()


def relative_rms(got: Any, want: Any) -> float:
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


def quantized(x: Any) -> tuple[Any, Any, Any]:
    """Codes int8 of x [rows, 32 g], the numbers that products read for each group of 32, and its meaning."""
    groups = x.reshape(len(x), -1, 32)
    scale = (np.abs(groups).max(-1) / 127).astype(np.float32)
    codes = np.rint(groups / np.where(scale > 0, scale, 1)[..., None]).astype(np.int8)
    numbers = np.zeros((*scale.shape, 4), np.float32)
    numbers[..., 0], numbers[..., 1] = scale, scale * codes.sum(-1, dtype=np.int32)
    numbers.view(np.int32)[..., 2:] = codes.reshape(*scale.shape, 2, 16).sum(-1, dtype=np.int32)
    return codes, numbers, (codes * scale[..., None].astype(np.float64)).reshape(x.shape)
