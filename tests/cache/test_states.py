"""What recurrent layers keep: views of one piece of memory, and whole slots as snapshots."""

from __future__ import annotations

import pytest
import torch

from hipfire.base.errors import InternalError
from hipfire.base.types import StateSpec
from hipfire.cache.states import ALIGNMENT, StateStore, state_nbytes

SPECS = (StateSpec(20, 4, 1, 2, 5, 5), StateSpec(7, 2, 1, 1, 2, 3))


def store(slots: int = 3) -> tuple[StateStore, torch.Tensor]:
    """Return a store whose slots hold their own number in every element."""
    memory = torch.zeros(slots, state_nbytes(SPECS), dtype=torch.uint8)
    for slot in range(slots):
        memory[slot].view(torch.float32).fill_(slot)
    return StateStore(SPECS, slots, memory), memory


def test_layers_lie_side_by_side_and_begin_at_whole_lines() -> None:
    states, memory = store()
    assert states.nbytes == memory.numel() == 3 * 4 * ALIGNMENT
    assert (states.slots, states.tail(0).shape, states.tail(1).shape) == (3, (3, 20, 3), (3, 7, 1))
    assert (states.matrix(0).shape, states.matrix(1).shape) == ((3, 2, 5, 5), (3, 1, 2, 3))
    for layer in range(2):
        for part in (states.tail(layer), states.matrix(layer)):
            assert part.dtype == torch.float32
            assert (part[1].data_ptr() - memory.data_ptr()) % ALIGNMENT == 0
    for number, (_, view) in enumerate(states.views(1)):
        view.fill_(10 + number)
    assert [float(part[1].mean()) for part in (states.tail(0), states.matrix(0))] == [10, 11]
    assert [float(part[1].mean()) for part in (states.tail(1), states.matrix(1))] == [12, 13]
    assert [name for name, _ in states.views(1)][::2] == [
        "tail of recurrent layer 0",
        "tail of recurrent layer 1",
    ]
    assert (states.matrix(1)[0] == 0).all()
    assert (states.matrix(1)[2] == 2).all()


def test_a_snapshot_is_a_copy_and_comes_back_whole() -> None:
    states, memory = store()
    kept = states.snapshot(1)
    before = memory.clone()
    memory[1].fill_(7)
    assert torch.equal(kept, before[1])
    states.restore(1, kept)
    assert torch.equal(memory, before)
    states.restore(2, kept)
    assert torch.equal(memory[2], kept)
    states.copy(0, 2)
    states.copy(1, 1)
    assert torch.equal(memory[2], before[0])
    assert torch.equal(memory[:2], before[:2])


def test_memory_of_another_size_is_refused() -> None:
    for shape, dtype in (((2, 5), torch.uint8), ((3, state_nbytes(SPECS)), torch.int8)):
        with pytest.raises(InternalError, match="does not fit"):
            StateStore(SPECS, 3, torch.zeros(shape, dtype=dtype))
