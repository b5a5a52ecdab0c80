"""Whole models on packed matrices and blocked caches: the numbers of decoded ones, in fewer launches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from packed_kit import random_runner

from helpers import rms
from hipfire.base.qtypes import QType
from hipfire.kernels.launch import Launcher, LaunchRecord
from hipfire.layers.context import Segment
from hipfire.runtime.runner import Runner
from tiny_models import KINDS, ROWS

QTYPES = (QType.MQ4G256, QType.GGUF_Q8_0)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, ROWS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def results(runner: Runner) -> list[torch.Tensor]:
    """Logits of prefills over a block's end, of ragged steps, of decode steps, and behind shared rows."""
    runner.prefill(0, text(300)[:270])
    kept = runner.snapshot(0) if runner.recurrent else None
    found = [runner.prefill(0, text(300)[270:], 270)[None], runner.all_logits(1, text(9, seed=1))]
    found.append(runner.step([(Segment(1, 9, 70), text(70, seed=2)), (Segment(0, 300, 1), [5])]))
    found.append(runner.step([(Segment(0, 301, 1), [6]), (Segment(1, 79, 1), [7])]))
    runner.share_rows(0, 2, 270, kept)
    found.append(runner.step([(Segment(2, 270, 1), [8])]))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qtype", QTYPES, ids=lambda qtype: qtype.name)
def test_packed_weights_over_blocks_give_the_numbers_of_decoded_ones(kind: str, qtype: QType) -> None:
    wanted = results(random_runner(kind, qtype, packed=False))
    runner = random_runner(kind, qtype, packed=True)
    memory = runner.cache._memory  # type: ignore[union-attr]
    for got, want in zip(results(runner), wanted, strict=True):
        assert float(want.std()) > 1e-3
        assert rms(got, want) < 1e-5
    # two blocks of positions, one, and as many as were copied
    assert memory.asked == [2, 1, 2]  # type: ignore[attr-defined]
    memory.check()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qtype", QTYPES, ids=lambda qtype: qtype.name)
def test_weights_that_read_the_same_activations_are_one_launch(kind: str, qtype: QType) -> None:
    tape: list[LaunchRecord] = []
    runner = random_runner(kind, qtype, packed=True, launcher=Launcher(tape=tape))
    runner.decode(0, 1, 0)
    ropes = 2 if kind == "gemma3" else 1
    rotated = qtype == QType.MQ4G256
    # of the two layers
    recurrent = int(kind == "qwen3_5")
    wanted = {
        "packed_select": 1,
        "rms_norm": 1,
        "residual_norm": 4,
        "packed_linear": 3 * 2 + 1,
        "packed_gated": 2,
        "rope_angles": ropes,
        "block_input": 2 - recurrent,
        "block_attention": 2 - recurrent,
        "delta_net": recurrent,
        "mul_sigmoid": recurrent,
        "gather_rows": 1,
        "scale": int(kind == "gemma3"),
        # before q, k and v, before o, before gate and up, before down, and before the head
        "fwht": (4 * 2 + 1) * rotated,
        "inverse_fwht": int(rotated),
    }
    assert Counter(record.op for record in tape) == Counter({op: n for op, n in wanted.items() if n})


@pytest.mark.parametrize(("qtype", "want"), [(QType.MQ4G256, "True"), (QType.GGUF_Q8_0, "False")])
def test_norms_are_told_whether_rotated_weights_read_them(qtype: QType, want: str) -> None:
    for kind in KINDS:
        tape: list[LaunchRecord] = []
        random_runner(kind, qtype, packed=True, launcher=Launcher(tape=tape)).decode(0, 1, 0)
        told = [record.scalars["rotated"] for record in tape if record.op == "residual_norm"]
        assert told == [want] * 4
