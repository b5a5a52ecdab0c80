"""Capturing graphs, on a stand-in for the runtime and, where there is one, on a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from hipfire.base.errors import InternalError, MemoryLimitError
from hipfire.device import graphs
from hipfire.device.graphs import Capturer, Graph, capture

DEVICE = torch.device("cuda", 1)


class Runtime:
    """A stand-in for torch.cuda: notes calls with the device and stream that were current."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device_now = 0
        self.stream_now = "main"
        self.allocations = 100
        self.fault: str | None = None

    def note(self, call: str) -> None:
        self.calls.append(f"{call} on {self.device_now}/{self.stream_now}")
        if self.fault is not None and call.startswith(self.fault):
            raise RuntimeError(f"{call} failed\nwith advice for debugging")

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, device.index
        try:
            yield
        finally:
            self.device_now = before

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        try:
            yield
        finally:
            self.stream_now = before

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return FakeStream(self, "main")

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == DEVICE
        return {"allocation.all.allocated": self.allocations}

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        assert (device, self.device_now) == (DEVICE, 1)
        return FakeStream(self, "side")

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)


class FakeStream:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.runtime.note(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.runtime.note(f"synchronize {self.name}")


class FakeGraph:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def capture_begin(self, capture_error_mode: str) -> None:
        # what the runtime itself takes as a capture begins is none of the launches'
        self.runtime.allocations += 2
        self.runtime.note(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self.runtime.note("end")

    def replay(self) -> None:
        self.runtime.note("replay")

    def reset(self) -> None:
        self.runtime.note("reset")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(graphs, "cuda", runtime)
    return runtime


def test_a_capture_is_on_its_own_device_and_a_side_stream(runtime: Runtime) -> None:
    graph = capture(lambda: runtime.note("launch"), DEVICE)
    graph.replay()
    assert runtime.calls == [
        "side waits for main on 1/main",
        "synchronize side on 1/main",
        "begin thread_local on 1/side",
        "launch on 1/side",
        "end on 1/side",
        "replay on 1/main",
    ]
    assert (runtime.device_now, runtime.stream_now) == (0, "main")


def test_a_warm_up_runs_on_the_stream_of_the_capture_in_order_with_the_rest(runtime: Runtime) -> None:
    capturer = Capturer(DEVICE)
    capturer.warm_up(lambda: runtime.note("launch"))
    assert runtime.calls == [
        "side waits for main on 1/main",
        "launch on 1/side",
        "main waits for side on 1/main",
    ]
    runtime.calls.clear()
    with pytest.raises(RuntimeError):
        capturer.warm_up(failing(runtime, "launch"))
    assert runtime.calls[-1] == "main waits for side on 1/main"


def failing(runtime: Runtime, call: str) -> Callable[[], None]:
    def run() -> None:
        runtime.fault = call
        try:
            runtime.note(call)
        finally:
            runtime.fault = None

    return run


def test_an_allocation_during_the_capture_is_an_error(runtime: Runtime) -> None:
    def run() -> None:
        runtime.allocations += 3

    with pytest.raises(InternalError, match="memory was allocated 3 times while launches were captured"):
        capture(run, DEVICE)
    assert [call.partition(" ")[0] for call in runtime.calls[-2:]] == ["end", "reset"]


@pytest.mark.parametrize("fault", ["begin", "end"])
def test_a_capture_that_fails_leaves_nothing_and_is_one_line(runtime: Runtime, fault: str) -> None:
    runtime.fault = fault
    with pytest.raises(InternalError, match=rf"launches could not be captured: {fault}.* failed$"):
        capture(lambda: runtime.note("launch"), DEVICE)
    assert runtime.calls[-1] == "reset on 1/side"
    assert (runtime.device_now, runtime.stream_now) == (0, "main")


def test_a_launch_that_fails_ends_the_capture(runtime: Runtime) -> None:
    with pytest.raises(InternalError, match="launches could not be captured: launch failed"):
        capture(failing(runtime, "launch"), DEVICE)
    assert runtime.calls[-3:] == ["launch on 1/side", "end on 1/side", "reset on 1/side"]


def test_a_typed_error_goes_through_even_if_the_capture_cannot_be_ended(runtime: Runtime) -> None:
    original = MemoryLimitError(5, 3, what="a step")

    def run() -> None:
        runtime.fault = "end"
        raise original

    with pytest.raises(MemoryLimitError) as caught:
        capture(run, DEVICE)
    assert caught.value is original
    assert runtime.calls[-2:] == ["end on 1/side", "reset on 1/side"]


def test_nothing_is_collected_during_a_capture(runtime: Runtime) -> None:
    seen: list[bool] = []
    capture(lambda: seen.append(gc.isenabled()), DEVICE)
    assert (seen, gc.isenabled()) == ([False], True)
    with pytest.raises(InternalError):
        capture(failing(runtime, "launch"), DEVICE)
    assert gc.isenabled()


def test_a_replay_that_fails_is_typed_and_a_release_happens_once(runtime: Runtime) -> None:
    graph = capture(lambda: runtime.note("launch"), DEVICE)
    runtime.fault = "replay"
    with pytest.raises(InternalError, match=r"the replay of a graph failed: replay.* failed$"):
        graph.replay()
    runtime.fault = None
    graph.release()
    assert runtime.calls[-1].startswith("reset")
    with pytest.raises(InternalError, match="released twice"):
        graph.release()
    with pytest.raises(InternalError, match="after its release"):
        graph.replay()


def captured(run: Callable[[], None], device: torch.device) -> Graph:
    run()
    torch.cuda.synchronize(device)
    return capture(run, device)


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_a_graph_on_a_gpu_replays_what_was_captured(index: int) -> None:
    if torch.cuda.device_count() <= index:
        pytest.skip(f"needs a GPU {index}")
    device = torch.device("cuda", index)
    x, y = torch.arange(5.0, device=device), torch.zeros(5, device=device)
    graph = captured(lambda: y.add_(x), device)
    # the first run counted, the capture did not
    assert y.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    for _ in range(3):
        graph.replay()
    assert y.tolist() == [0.0, 4.0, 8.0, 12.0, 16.0]
    graph.release()


@pytest.mark.gpu
def test_an_allocation_in_a_capture_on_a_gpu_is_an_error_and_the_device_goes_on() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    x = torch.ones(1000, device=device)
    with pytest.raises(InternalError, match="device memory was allocated"):
        captured(lambda: x.copy_(x + 1), device)
    with pytest.raises(InternalError, match="could not be captured"):
        captured(lambda: x[:1].fill_(float(x.sum())), device)
    graph = captured(lambda: x.mul_(2), device)
    graph.replay()
    assert float(x[0]) > 1
