"""What the host waits for: results of a GPU are computed before they are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hipfire.base.errors import InternalError
from hipfire.engine.stepping import Part, run_together
from hipfire.layers.context import Segment
from hipfire.runtime.waiting import fetch, finish

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_cpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*_: object) -> None:
        raise RuntimeError("waited")

    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    finish(torch.device("cpu"))
    row = torch.randn(5)
    assert fetch(row) is row


def test_a_gpu_is_waited_for_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    finish(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


@gpu
def test_what_a_gpu_computes_comes_whole() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        x = torch.nn.functional.normalize(x @ x)
    host = fetch(x)
    assert host.device.type == "cpu"
    assert torch.equal(host, x.cpu())
    # what was fetched before stays as it was
    again = fetch(x + 1)
    assert again.data_ptr() != host.data_ptr()
    assert torch.equal(host, x.cpu())


def test_a_step_of_several_sequences_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, fetched = torch.randn(3, 7), []

    def copy(values: torch.Tensor) -> torch.Tensor:
        fetched.append(values)
        return values.clone()

    monkeypatch.setattr("hipfire.engine.stepping.fetch", copy)
    runner: Any = SimpleNamespace(step=lambda batch: rows)
    found = run_together(runner, [Part(slot, 4, [9]) for slot in range(3)])
    assert len(fetched) == 1
    assert all(torch.equal(got, row) for got, row in zip(found, rows, strict=True))  # type: ignore[arg-type]


def test_a_fault_of_the_copy_belongs_to_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells of a step's fault when its result is asked for."""

    def step(batch: list[tuple[Segment, list[int]]]) -> torch.Tensor:
        return torch.tensor([[float(segment.slot)] for segment, _ in batch])

    def copy(values: torch.Tensor) -> torch.Tensor:
        if (values == 1).any():
            raise InternalError("the device failed")
        return values

    monkeypatch.setattr("hipfire.engine.stepping.fetch", copy)
    runner: Any = SimpleNamespace(step=step)
    found = run_together(runner, [Part(slot, 0, [3]) for slot in range(3)])
    assert [each.item() for each in found if isinstance(each, torch.Tensor)] == [0.0, 2.0]
    assert isinstance(found[1], InternalError)
