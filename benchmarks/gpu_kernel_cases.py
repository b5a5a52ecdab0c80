"""What benchmarks/kernels.py times: inputs, launches, and the bytes and operations that they need.

This file times nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_bench_kit import (
    Bench,
    Run,
    random_matrix,
)
from hipfire.base.sampling import SamplingParams
from hipfire.kernels.block_cache import BLOCK, attention_tiles
from hipfire.kernels.gpu.attention import block_attention, block_attention_q8
from hipfire.kernels.gpu.attention_input import block_input_q8
from hipfire.kernels.gpu.dense import dense
from hipfire.kernels.gpu.dequantize import dequantize
from hipfire.kernels.gpu.gemm import gemm
from hipfire.kernels.gpu.gemv import gemv
from hipfire.kernels.gpu.norms import residual_norm, rms_norm
from hipfire.kernels.gpu.prepare import prepare
from hipfire.kernels.gpu.products import packed_gated, packed_linear
from hipfire.kernels.gpu.rotate import fwht
from hipfire.kernels.gpu.sample import greedy, sample
from hipfire.kernels.packed import PACKED_LAYOUTS
from hipfire.kernels.sample import pack_settings, stages


@dataclass(frozen=True)
class Work:
    """What is timed: a run of `count` equal pieces, each of so many bytes and operations."""

    run: Run
    count: int
    nbytes: int
    operations: int = 0


@dataclass(frozen=True)
class Case:
    """One row of the table; `build` makes the inputs."""

    kernel: str
    name: str
    build: Callable[[Bench], Work]


@dataclass(frozen=True)
class Sizes:
    """The shapes of a run. `matrices` and `working_set` bytes are the least that products go through."""

    shapes: tuple[tuple[int, int], ...]
    gated: tuple[int, int]
    layouts: tuple[str, ...]
    few_rows: tuple[int, ...]
    some_rows: tuple[int, ...]
    many_rows: tuple[int, ...]
    matrices: int
    working_set: int
    width: int
    heads: tuple[int, int, int]
    depths: tuple[int, ...]
    prompts: tuple[int, ...]
    sequences: int
    vocabularies: tuple[int, ...]


FULL = Sizes(
    shapes=((34816, 5120), (5120, 17408), (4096, 4096), (6144, 2048)),
    gated=(24576, 4096),
    layouts=("u4g256", "u4g128h", "u6g256", "i8g32"),
    few_rows=(1, 2),
    some_rows=(8, 32, 128),
    many_rows=(512, 4096),
    matrices=20,
    working_set=256 << 20,
    width=4096,
    heads=(32, 8, 128),
    depths=(512, 16384),
    prompts=(512, 4096),
    sequences=32,
    vocabularies=(151936, 262144),
)
# for interpreted kernels
TINY = Sizes(
    shapes=((8, 32),),
    gated=(8, 32),
    layouts=("i8g32",),
    few_rows=(1,),
    some_rows=(3,),
    many_rows=(130,),
    matrices=2,
    working_set=0,
    width=256,
    heads=(2, 1, 32),
    depths=(20,),
    prompts=(20,),
    sequences=2,
    vocabularies=(70,),
)


def kernel_cases(sizes: Sizes) -> Iterator[Case]:
    """Return all cases but those of whole layers, products first."""
    yield from _products(sizes)
    yield from _attention(sizes)
    yield from _rows(sizes)
    yield from _samplers(sizes)


def _products(sizes: Sizes) -> Iterator[Case]:
    for layout in sizes.layouts:
        for tokens in sizes.few_rows:
            for rows, cols in sizes.shapes:
                yield Case(
                    "gemv", f"{layout} {rows}x{cols} x{tokens}", _gemv(sizes, layout, rows, cols, tokens)
                )
            rows, cols = sizes.gated
            build = _gemv(sizes, layout, rows, cols, tokens, "silu")
            yield Case("gemv gated", f"{layout} {rows}x{cols} x{tokens}", build)
    for layout in sizes.layouts:
        for tokens in sizes.some_rows:
            for rows, cols in sizes.shapes[:3]:
                yield Case(
                    "gemm", f"{layout} {rows}x{cols} x{tokens}", _gemm(sizes, layout, rows, cols, tokens)
                )
            rows, cols = sizes.gated
            build = _gemm(sizes, layout, rows, cols, tokens, "silu")
            yield Case("gemm gated", f"{layout} {rows}x{cols} x{tokens}", build)
    for rows, cols in sizes.shapes[:3]:
        yield Case("dense bf16", f"{rows}x{cols} x1", _dense(sizes, rows, cols, 1))
    for layout in sizes.layouts:
        for rows, cols in sizes.shapes[:3]:
            yield Case("dequantize", f"{layout} {rows}x{cols}", _dequantize(layout, rows, cols))
    for layout in sizes.layouts[:2]:
        for tokens in sizes.many_rows:
            for rows, cols in sizes.shapes[:3]:
                build = _library(layout, rows, cols, tokens)
                yield Case("dequantize, library", f"{layout} {rows}x{cols} x{tokens}", build)
            rows, cols = sizes.gated
            build = _library(layout, rows, cols, tokens, gated=True)
            yield Case("dequantize, library, gate", f"{layout} {rows}x{cols} x{tokens}", build)


def _count(sizes: Sizes, nbytes: int) -> int:
    return max(sizes.matrices, math.ceil(sizes.working_set / nbytes))


def _activations(bench: Bench, tokens: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, cols, device=bench.device).to(dtype)


def _gemv(
    sizes: Sizes, layout: str, rows: int, cols: int, tokens: int, activation: str | None = None
) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        count = _count(sizes, PACKED_LAYOUTS[layout].nbytes(rows, cols))
        matrices = [random_matrix(bench, layout, rows, cols) for _ in range(count)]
        x = prepare(bench.engine(), _activations(bench, tokens, cols), "int8")
        columns = rows // 2 if activation else rows
        outs = [torch.empty(tokens, columns, device=bench.device) for _ in matrices]

        def run() -> None:
            for matrix, out in zip(matrices, outs, strict=True):
                engine.settle()
                gemv(engine, x, matrix, out, activation)

        assert x.scales is not None
        given = x.values.nbytes + x.scales.nbytes + x.sums.nbytes
        return Work(run, count, matrices[0].nbytes + given + outs[0].nbytes, 2 * rows * cols * tokens)

    return build


def _gemm(
    sizes: Sizes, layout: str, rows: int, cols: int, tokens: int, activation: str | None = None
) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        count = _count(sizes, PACKED_LAYOUTS[layout].nbytes(rows, cols))
        matrices = [random_matrix(bench, layout, rows, cols) for _ in range(count)]
        x = prepare(bench.engine(), _activations(bench, tokens, cols), "bf16")
        out = torch.empty(tokens, rows // 2 if activation else rows, device=bench.device)

        def run() -> None:
            for matrix in matrices:
                engine.settle()
                gemm(engine, x, matrix, out, activation)

        given = x.values.nbytes + x.sums.nbytes
        return Work(run, count, matrices[0].nbytes + given + out.nbytes, 2 * rows * cols * tokens)

    return build


def _dense(sizes: Sizes, rows: int, cols: int, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        weights = [
            torch.randn(rows, cols, device=bench.device).bfloat16()
            for _ in range(_count(sizes, 2 * rows * cols))
        ]
        x, out = _activations(bench, tokens, cols), torch.empty(tokens, rows, device=bench.device)

        def run() -> None:
            for weight in weights:
                engine.settle()
                dense(engine, x, weight, out)

        nbytes = weights[0].nbytes + x.nbytes + out.nbytes
        return Work(run, len(weights), nbytes, 2 * rows * cols * tokens)

    return build


def _dequantize(layout: str, rows: int, cols: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        matrices = [random_matrix(bench, layout, rows, cols) for _ in range(4)]
        outs = [torch.empty(rows, cols, dtype=torch.bfloat16, device=bench.device) for _ in range(4)]

        def run() -> None:
            for matrix, out in zip(matrices, outs, strict=True):
                engine.settle()
                dequantize(engine, matrix, out)

        return Work(run, len(matrices), matrices[0].nbytes + outs[0].nbytes)

    return build


def _library(
    layout: str, rows: int, cols: int, tokens: int, *, gated: bool = False
) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        matrices = [random_matrix(bench, layout, rows, cols) for _ in range(4)]
        x = _activations(bench, tokens, cols, torch.bfloat16)

        def run() -> None:
            for matrix in matrices:
                engine.settle()
                if gated:
                    packed_gated(engine, x, matrix, "silu")
                else:
                    packed_linear(engine, x, matrix)

        out_bytes = 2 * tokens * (rows // 2 if gated else rows)
        return Work(run, 4, matrices[0].nbytes + x.nbytes + out_bytes, 2 * rows * cols * tokens)

    return build


def _attention(sizes: Sizes) -> Iterator[Case]:
    for kv in ("q8", "bf16"):
        for depth in sizes.depths:
            yield Case("decode attention", f"{kv} depth {depth}", _decode(sizes, kv, depth, 1, depth))
        yield Case(
            "decode attention",
            f"{kv} depth {sizes.depths[0]} of {sizes.depths[-1]}",
            _decode(sizes, kv, sizes.depths[0], 1, sizes.depths[-1]),
        )
        short, many = sizes.depths[0], sizes.sequences
        name = f"{kv} depth {short} x{many}"
        yield Case("decode attention", name, _decode(sizes, kv, short, many, short))
        for tokens in sizes.prompts:
            yield Case("prefill attention", f"{kv} {tokens} tokens", _prefill(sizes, kv, tokens))
    for tokens in (1, sizes.sequences, *sizes.prompts):
        yield Case("rotate and store heads", f"q8 x{tokens}", _heads(sizes, tokens))


def _caches(
    bench: Bench, sizes: Sizes, kv: str, slots: int, capacity: int, layers: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of several layers, in blocks as `cache.block` lays them out."""
    _, kv_heads, d = sizes.heads
    blocks, elements = math.ceil(capacity / BLOCK), kv_heads * d
    found = []
    for _ in range(layers):
        if kv == "q8":
            memory = torch.empty(
                slots, blocks, 2, BLOCK, elements // 32 * 34, dtype=torch.uint8, device=bench.device
            )
            memory.random_(0, 256)
            # scales are halves: all of them 0x2020, which is 0.008
            memory[..., elements:].fill_(0x20)
        else:
            memory = torch.empty(slots, blocks, 2, BLOCK, elements, dtype=torch.bfloat16, device=bench.device)
            memory.normal_()
        found.append((memory[:, :, 0], memory[:, :, 1]))
    return found


def _decode(sizes: Sizes, kv: str, depth: int, sequences: int, capacity: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        heads, _, d = sizes.heads
        caches = _caches(bench, sizes, kv, sequences, capacity, sizes.matrices)
        q = torch.randn(sequences, heads, d, device=bench.device)
        rows = torch.tensor([(slot, depth - 1) for slot in range(sequences)], device=bench.device)
        attend = block_attention_q8 if kv == "q8" else block_attention

        def run() -> None:
            for keys, values in caches:
                engine.settle()
                attend(engine, q, keys, values, rows, d**-0.5)

        row_bytes = caches[0][0].shape[-1] * caches[0][0].element_size()
        nbytes = 2 * sequences * depth * row_bytes + 2 * q.nbytes
        return Work(run, len(caches), nbytes, 4 * sequences * depth * heads * d)

    return build


def _prefill(sizes: Sizes, kv: str, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        heads, _, d = sizes.heads
        caches = _caches(bench, sizes, kv, 1, tokens, 2)
        q = torch.randn(tokens, heads, d, device=bench.device).bfloat16()
        rows = torch.tensor([(0, place) for place in range(tokens)], device=bench.device)
        tiles = torch.tensor(attention_tiles([tokens]), dtype=torch.int32, device=bench.device)
        attend = block_attention_q8 if kv == "q8" else block_attention

        def run() -> None:
            for keys, values in caches:
                engine.settle()
                attend(engine, q, keys, values, rows, d**-0.5, None, tiles)

        row_bytes = caches[0][0].shape[-1] * caches[0][0].element_size()
        operations = 4 * heads * d * tokens * (tokens + 1) // 2
        return Work(run, len(caches), 2 * tokens * row_bytes + 2 * q.nbytes, operations)

    return build


def _heads(sizes: Sizes, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        heads, kv_heads, d = sizes.heads
        caches = _caches(bench, sizes, "q8", 1, tokens, 4)
        both = _activations(
            bench, tokens, (heads + 2 * kv_heads) * d, torch.float32 if tokens <= 256 else torch.bfloat16
        )
        q, k, v = (
            part.view(tokens, -1, d) for part in both.split([heads * d, kv_heads * d, kv_heads * d], dim=1)
        )
        rows = torch.tensor([(0, place) for place in range(tokens)], device=bench.device)
        angles = torch.rand(tokens, d // 2, device=bench.device)
        cos, sin, weight = angles.cos(), angles.sin(), torch.ones(d, device=bench.device)

        def run() -> None:
            for keys, values in caches:
                engine.settle()
                block_input_q8(engine, q, k, v, rows, cos, sin, keys, values, weight, weight, 1e-6)

        written = 2 * tokens * caches[0][0].shape[-1] + q.numel() * both.element_size()
        return Work(run, len(caches), both.nbytes + written)

    return build


def _rows(sizes: Sizes) -> Iterator[Case]:
    for tokens in (1, sizes.sequences, *sizes.prompts):
        name = f"{tokens}x{sizes.width}"
        yield Case("rms norm", name, _norm(sizes, tokens))
        yield Case("residual norm", name, _residual(sizes, tokens, rotated=False))
        yield Case("residual norm, rotation", name, _residual(sizes, tokens, rotated=True))
        yield Case("rotation", name, _rotation(sizes, tokens))
    for tokens, kind in ((1, "int8"), (sizes.some_rows[-1], "bf16")):
        yield Case("prepare", f"{kind} {tokens}x{sizes.width}", _preparation(sizes, tokens, kind))


def _norm(sizes: Sizes, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine, weight = bench.engine(), torch.ones(sizes.width, device=bench.device)
        inputs = [_activations(bench, tokens, sizes.width) for _ in range(4)]

        def run() -> None:
            for x in inputs:
                engine.settle()
                rms_norm(engine, x, weight, 1e-6)

        return Work(run, len(inputs), tokens * sizes.width * (4 + _result_bytes(tokens)))

    return build


def _result_bytes(tokens: int) -> int:
    """Return the bytes of an element that only products read."""
    return 4 if tokens <= 256 else 2


def _residual(sizes: Sizes, tokens: int, *, rotated: bool) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine, weight = bench.engine(), torch.ones(sizes.width, device=bench.device)
        kind = torch.float32 if tokens <= 256 else torch.bfloat16
        inputs = [
            (_activations(bench, tokens, sizes.width), _activations(bench, tokens, sizes.width, kind))
            for _ in range(4)
        ]

        def run() -> None:
            for x, delta in inputs:
                engine.settle()
                residual_norm(engine, x, delta, weight, 1e-6, rotated=rotated)

        results = (2 if rotated else 1) * _result_bytes(tokens)
        return Work(run, len(inputs), tokens * sizes.width * (8 + kind.itemsize + results))

    return build


def _rotation(sizes: Sizes, tokens: int) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine, size = bench.engine(), _result_bytes(tokens)
        kind = torch.float32 if size == 4 else torch.bfloat16
        inputs = [_activations(bench, tokens, sizes.width, kind) for _ in range(4)]

        def run() -> None:
            for x in inputs:
                engine.settle()
                fwht(engine, x)

        return Work(run, len(inputs), 2 * tokens * sizes.width * size)

    return build


def _preparation(sizes: Sizes, tokens: int, kind: str) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        inputs = [_activations(bench, tokens, sizes.width) for _ in range(4)]

        def run() -> None:
            for x in inputs:
                engine.settle()
                prepare(engine, x, "int8" if kind == "int8" else "bf16")

        each = 1 if kind == "int8" else 2
        return Work(run, len(inputs), tokens * sizes.width * (4 + each))

    return build


def _samplers(sizes: Sizes) -> Iterator[Case]:
    everything = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1, frequency_penalty=0.1
    )
    settings = {
        "temperature": SamplingParams(temperature=0.8, top_k=0, top_p=1.0),
        "top-p": SamplingParams(temperature=0.8, top_k=0, top_p=0.95),
        "all stages": everything,
    }
    for vocabulary in sizes.vocabularies:
        for rows in (1, sizes.sequences):
            yield Case("greedy", f"{rows}x{vocabulary}", _sampler(vocabulary, rows, None))
            for name, params in settings.items():
                yield Case("sample", f"{rows}x{vocabulary} {name}", _sampler(vocabulary, rows, params))


def _sampler(vocabulary: int, rows: int, params: SamplingParams | None) -> Callable[[Bench], Work]:
    def build(bench: Bench) -> Work:
        engine = bench.engine()
        inputs = [3 * _activations(bench, rows, vocabulary) for _ in range(4)]
        draws = torch.rand(rows, device=bench.device)
        history = torch.randint(0, vocabulary, (rows, 64), device=bench.device)
        asked = [params or SamplingParams()] * rows
        settings, needed = pack_settings(asked).to(bench.device), stages(asked)

        def run() -> None:
            for logits in inputs:
                engine.settle()
                if params is None:
                    greedy(engine, logits)
                else:
                    sample(engine, logits, settings, draws, history, None, needed)

        return Work(run, len(inputs), inputs[0].nbytes)

    return build
