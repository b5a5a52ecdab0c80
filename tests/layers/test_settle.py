"""What a step says it still needs between its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_kit import random_runner

from hipfire.base.qtypes import QType
from hipfire.kernels.launch import Launcher, Op
from hipfire.layers.context import Segment
from tiny_models import KINDS

NAN = float("nan")


class Reusing(Launcher):
    """Ruins every result that is not kept when a step settles, as memory that is used again would be."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[torch.Tensor] = []
        self.settled = self.ruined = 0

    def run(self, op: Op, *args: Any, **kwargs: Any) -> Any:
        result = super().run(op, *args, **kwargs)
        self.results += result if isinstance(result, tuple) else (result,)
        return result

    def settle(self, *kept: torch.Tensor) -> None:
        super().settle(*kept)
        places = {tensor.untyped_storage().data_ptr() for tensor in kept}
        gone = [part for part in self.results if part.untyped_storage().data_ptr() not in places]
        for part in gone:
            part.fill_(NAN)
        self.settled += 1
        self.ruined += len(gone)
        self.results = [part for part in self.results if part.untyped_storage().data_ptr() in places]
        # the sum so far, what is added to it, and the angles of up to two kinds of layers
        assert len(kept) in (2, 4, 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [True, False])
def test_nothing_is_read_after_it_was_given_up(kind: str, packed: bool) -> None:
    launcher = Reusing()
    runner = random_runner(kind, QType.MQ4G256, packed=packed, launcher=launcher)
    plain = random_runner(kind, QType.MQ4G256, packed=packed)
    steps = [(Segment(0, 0, 5), [1, 2, 3, 4, 5])], [(Segment(0, 5, 1), [6]), (Segment(1, 0, 1), [7])]
    for step in steps:
        assert torch.equal(runner.step(step), plain.step(step))
        launcher.results.clear()
    assert launcher.settled == 2 * 2
    assert launcher.ruined > 4 * launcher.settled
