"""Parts of checkpoints in every kind of format add up to the whole; processes are threads here."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers import MemoryCheckpoint
from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.base.qtypes import QType
from hipfire.cache.kv import KvCache, kv_mode
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.layers.context import Segment
from hipfire.layers.decoder import HEAD
from hipfire.models.family import ModelConfig, ModelFamily, families
from hipfire.runtime.parallel_messages import ShareRows, Step, Stop, encode, read
from hipfire.runtime.parallel_weights import Shard, planned_shard
from hipfire.runtime.runner import Runner
from hipfire.runtime.shard import Part
from hipfire.runtime.weights import CheckpointWeights
from tiny_models import KINDS, TOKENS, tiny_model, weights_of


@dataclass(frozen=True)
class Found:
    family: ModelFamily
    config: ModelConfig
    named: NamedCheckpoint


class Threads:
    """What the groups of some threads share: a place for each, and a barrier."""

    def __init__(self, size: int) -> None:
        self.places: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


class ThreadGroup:
    """One thread's end of a group."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.size = len(threads.places)
        self._threads = threads
        self._rank = rank

    def direct(self, x: torch.Tensor) -> bool:
        return False

    def sum(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x).sum(0))

    def sum_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._exchange(x))

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        self._threads.places[self._rank] = x.clone()
        self._threads.barrier.wait(20)
        everything = torch.stack(self._threads.places)
        self._threads.barrier.wait(20)
        return everything


def model(kind: str, qtype: QType, **change: Any) -> Found:
    """Return a random model whose matrices are encoded in a format."""
    source = tiny_model(kind, **change)
    checkpoint = MemoryCheckpoint("safetensors", source.config.to_dict())
    for name, values in weights_of(source).items():
        checkpoint.add(name, values, qtype if values.ndim == 2 else QType.F32)
    family = next(each for each in families().values() if each.oracle == KINDS[kind][0])
    config = family.from_hf(source.config.to_dict())
    return Found(family, config, NamedCheckpoint(checkpoint, family.names, config.sizes.layers))


def runner(found: Found) -> Runner:
    sizes = found.config.sizes
    weights = CheckpointWeights(found.named, heads=sizes.heads, kv_heads=sizes.kv_heads, residency="decoded")
    cache = KvCache(found.config.cache_specs(), mode=kv_mode("f32"), slots=1, max_seq=32)
    return Runner(found.family.build(found.config, weights), cache)


def logits(found: Found) -> torch.Tensor:
    """Return logits of a prompt and of one decode step after it."""
    running = runner(found)
    rows = running.all_logits(0, TOKENS)
    return torch.cat((rows, running.decode(0, 65, len(TOKENS))[None]))


def parts(found: Found, size: int) -> list[torch.Tensor]:
    """Return the logits that every process has."""
    threads = Threads(size)

    def run(rank: int) -> torch.Tensor:
        return logits(Shard(Part(rank, size), ThreadGroup(threads, rank)).of(found))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


WIDE = {"head_dim": 64, "intermediate_size": 512}


@pytest.mark.parametrize(
    ("kind", "qtype", "size", "change"),
    [
        ("llama", QType.F32, 4, {"tie_word_embeddings": False}),
        ("llama", QType.HFQ4G256, 2, WIDE),
        ("qwen3", QType.MQ4G256V2, 2, WIDE),
        ("qwen3", QType.MQ6G256, 2, {**WIDE, "num_key_value_heads": 1}),
        ("gemma3", QType.Q8F16, 8, {"intermediate_size": 512, "tie_word_embeddings": False}),
        ("gemma3", QType.BF16, 2, {"vocab_size": 261, "tie_word_embeddings": False}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_parts_add_up_to_the_whole(kind: str, qtype: QType, size: int, change: dict[str, Any]) -> None:
    found = model(kind, qtype, **change)
    whole = logits(found).double()
    for mine in parts(found, size):
        error = (mine.double() - whole).square().mean().sqrt() / whole.square().mean().sqrt()
        assert mine.shape == whole.shape
        assert float(error) < 1e-5


def test_a_part_has_its_share_of_matrices_heads_and_cache() -> None:
    found = model("llama", QType.F32, tie_word_embeddings=False)
    part = planned_shard(4).of(found)
    shapes = part.config.tensors()
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 256)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 256)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (256, 88)
    assert shapes[HEAD] == (66, 256)
    assert {spec.kv_heads for spec in part.config.cache_specs()} == {1}
    for name, shape in shapes.items():
        info = part.named.require(name, shape).info
        assert part.named.checkpoint.raw(info.name).nbytes == info.nbytes == 4 * torch.Size(shape).numel()


def test_columns_that_share_a_scale_are_not_cut() -> None:
    with pytest.raises(UnsupportedError, match=r"down_proj.*256 columns.*would have 176"):
        planned_shard(2).of(model("llama", QType.HFQ4G256, head_dim=64))
    # blocks of 128 columns, but rotations of 256
    with pytest.raises(UnsupportedError, match=r"o_proj.*256 columns.*would have 128"):
        planned_shard(2).of(model("llama", QType.MQ4G256V2, intermediate_size=512))


def test_a_model_that_is_only_planned_does_not_run() -> None:
    with pytest.raises(InternalError, match="only planned"):
        logits(planned_shard(2).of(model("llama", QType.F32)))


@pytest.mark.parametrize(
    "message",
    [
        Step([(Segment(0, 5, 1), [7])], every_row=False),
        Step([(Segment(3, 0, 2), [1, 2]), (Segment(1, 9, 3), [4, 5, 6])], every_row=True),
        ShareRows(1, 0, 250),
        Stop(),
    ],
)
def test_messages_come_out_as_they_went_in(message: Step | ShareRows | Stop) -> None:
    stream = io.BytesIO(encode(message) + encode(ShareRows(5, 6, 7)))
    assert read(stream) == message
    assert read(stream) == ShareRows(5, 6, 7)
    # whoever sent them is gone
    assert read(stream) == Stop()
    assert read(io.BytesIO(encode(message)[:-1])) == Stop()


@pytest.mark.parametrize("numbers", [[0], [-4], [1 << 40], [1, 9]])
def test_what_is_no_message_is_refused(numbers: list[int]) -> None:
    stream = io.BytesIO(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
    with pytest.raises(InternalError, match="came"):
        read(stream)
