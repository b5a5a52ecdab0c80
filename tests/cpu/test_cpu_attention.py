"""Attention: both kernels give the same bytes, however a sequence is cut and whoever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import LONG, MIXED, Scene, make_scene, poisoned_cache, rows_of, write_op, write_reference
from cpu_kit import digest, launcher_of, poisoned_memory, random_rows, raw_bytes, row_errors

from hipfire.cache.kv import KV_MODES
from hipfire.kernels.cpu import ops
from hipfire.kernels.cpu.attention_parts import CHUNK
from hipfire.kernels.cpu.engine import CpuEngine

MODES = tuple(KV_MODES)
WINDOWS = (None, 1, 5, 64, 65, 300)
# numbers of queries below which chunks of keys are shared out: all, or none
ALL_CHUNKS, ALL_WHOLE = 1 << 40, 0


def attend(scene: Scene, window: int | None, part: slice = slice(None), threads: int = 2) -> torch.Tensor:
    with poisoned_memory():
        result: torch.Tensor = launcher_of(threads).run(
            KV_MODES[scene.mode].attend,
            *(scene.q[part], scene.keys, scene.values, scene.rows[part], scene.scale, window),
        )
    return result


def scenes(mode: str) -> Iterator[Scene]:
    yield make_scene(mode, MIXED, heads=2, group=3, size=64)
    yield make_scene(mode, LONG, heads=1, group=4, size=32)
    if mode != "q8":
        yield make_scene(mode, MIXED, heads=3, group=1, size=20)
        yield make_scene(mode, ((0, 2 * CHUNK - 1, 3),), heads=2, group=1, size=8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS)
def test_both_kernels_give_the_same_bytes_and_those_of_float64(
    mode: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scene in scenes(mode):
        found = {}
        for few in (ALL_CHUNKS, ALL_WHOLE):
            monkeypatch.setattr(ops, "FEW_QUERIES", few)
            for threads in (1, 2, 3):
                found[few, threads] = digest([attend(scene, window, threads=threads)])
        assert len(set(found.values())) == 1, found
        got = attend(scene, window).double().numpy()
        assert row_errors(got, scene.want(window)).max() < 2e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 5, 300])
def test_a_query_has_the_same_bytes_alone_and_in_every_batch(mode: str, window: int | None) -> None:
    for scene in scenes(mode):
        together = attend(scene, window)
        for count in (1, 7):
            parts = [attend(scene, window, slice(i, i + count)) for i in range(0, len(scene.rows), count)]
            assert raw_bytes(torch.cat(parts)) == raw_bytes(together), count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("few", [ALL_CHUNKS, ALL_WHOLE])
def test_a_query_has_the_same_bytes_wherever_it_stands_in_its_group(
    mode: str, size: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "FEW_QUERIES", few)
    scene = make_scene(mode, MIXED, heads=2, group=3, size=size)
    equal = scene.q.view(-1, 2, 3, size)[:, :, :1].expand(-1, -1, 3, -1)
    result = attend(replace(scene, q=equal.reshape(-1, 6, size)), None).view(-1, 2, 3, size)
    for place in (1, 2):
        assert raw_bytes(result[:, :, place].contiguous()) == raw_bytes(result[:, :, 0].contiguous())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 1, 64])
def test_feeding_a_sequence_in_any_steps_gives_the_same_bytes(mode: str, window: int | None) -> None:
    """Writing and attending step by step sees what was written before, and nothing else."""
    length, heads, group, size = 140, 2, 2, 32
    inputs = [random_rows(length, heads * n, size, seed=n) for n in (1, 3, group)]
    results = []
    for step in (length, 7, 1):
        launcher = launcher_of(2)
        keys, values = (poisoned_cache(mode, 2, length, heads, size) for _ in range(2))
        parts = []
        for first in range(0, length, step):
            part = slice(first, min(first + step, length))
            rows = rows_of([(1, first, part.stop - first)])
            launcher.run(write_op(mode), keys, rows, inputs[0][part])
            launcher.run(write_op(mode), values, rows, inputs[1][part, :heads])
            q, scale = inputs[2][part], size**-0.5
            parts.append(launcher.run(KV_MODES[mode].attend, q, keys, values, rows, scale, window))
        results.append(digest([torch.cat(parts), keys, values]))
    assert results[0] == results[1] == results[2]


def test_the_keys_of_other_slots_and_later_positions_are_not_seen() -> None:
    scene = make_scene("f32", ((0, 70, 1), (1, 70, 1)), heads=2, group=2, size=16)
    before = attend(scene, None)
    rows = rows_of([(1, 0, 71)])
    for cache in (scene.keys, scene.values):
        write_reference("f32", cache, rows, random_rows(71, 2, 16, seed=99))
        cache[0, 71:] = 1e30
    after = attend(scene, None)
    assert raw_bytes(after[:1]) == raw_bytes(before[:1])
    assert raw_bytes(after[1:]) != raw_bytes(before[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("few", [ALL_CHUNKS, ALL_WHOLE])
def test_scores_of_any_size_give_weighted_means(mode: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "FEW_QUERIES", few)
    for spread in (0.0, 1e-30, 1e4, 1e30):
        scene = make_scene(mode, MIXED, heads=2, group=2, size=32, spread=spread)
        got, want = attend(scene, None).double(), torch.from_numpy(scene.want())
        assert torch.isfinite(got).all()
        if spread <= 1.0:
            assert row_errors(got.numpy(), want.numpy()).max() < 2e-6
        else:
            # all weight on one key: float32 scores decide as float64 does
            assert ((got - want).abs().amax(dim=(1, 2)) < 1e-3).double().mean() > 0.9


def test_few_queries_share_out_chunks_and_many_share_out_tokens() -> None:
    for tokens, names in ((1, ("attend-chunks-f32", "merge-chunks")), (64, ("attend-f32",))):
        scene = make_scene("f32", ((0, 0, tokens),), heads=1, group=2, size=16)
        engine = CpuEngine(2)
        engine.record()
        ops.attend(engine, scene.q, scene.keys, scene.values, scene.rows, scene.scale)
        program = engine.finish()
        assert program is not None
        assert program.kernels == names
