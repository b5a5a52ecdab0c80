"""One step of several sequences, such that a fault in one of them leaves the others alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hipfire.layers.context import Segment
from hipfire.runtime.runner import Runner
from hipfire.runtime.waiting import fetch


class Part(NamedTuple):
    """The tokens of one sequence in a step, the first of them at position `start` of `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]


def run_together(runner: Runner, parts: Sequence[Part]) -> list[torch.Tensor | Exception]:
    """Run one step; returns for each part the logits [vocab] of its last token on the host, or its error.

    A step that fails as a whole is run again for each sequence alone, which gives the same bytes.
    """
    batch = [(Segment(part.slot, part.start, len(part.tokens)), part.tokens) for part in parts]
    try:
        # one copy for all: sequences that each ask a GPU for their own row would each wait for it
        return list(fetch(runner.step(batch)))
    except Exception as error:
        if len(parts) == 1:
            return [error]
        return [run_together(runner, [part])[0] for part in parts]
