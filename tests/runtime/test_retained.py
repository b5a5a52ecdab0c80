"""Retained decode on the GPU engine: bytes of steps run one by one, and what happens when something fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
from retained_kit import DEVICE, Steps, score_kernel

from hipfire.base.errors import InternalError, UnsupportedError
from hipfire.kernels.gpu.engine import FreshScratch
from hipfire.layers.context import Segment
from hipfire.runtime import retained
from hipfire.runtime.retained import RetainedDecode
from hipfire.runtime.route import ReplayError, Route

MIXED = ((0,), (2,), (0,), (0, 1), (1, 0), (1, 0), (2,), (3, 1, 2), (2, 0, 1), (0, 3, 2), (1,), (0, 2))


def retained_of(steps: Steps) -> RetainedDecode:
    assert steps.replay is not None
    return steps.replay


def route_of(steps: Steps) -> Route:
    return retained_of(steps).route()


def feed(slots: Sequence[Sequence[int]]) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Places and tokens of decode steps for these slots, each at its own next position."""
    positions = [0] * 4
    for index, chosen in enumerate(slots):
        yield [(slot, positions[slot]) for slot in chosen], [(7 * index + 3 * slot) % 32 for slot in chosen]
        for slot in chosen:
            positions[slot] += 1


def check(steps: Steps, slots: Sequence[Sequence[int]], plain: Steps | None = None) -> None:
    """Compare every step's logits, and the cache at the end, with those of plain steps."""
    plain = plain or Steps(replaying=False)
    for places, tokens in feed(slots):
        assert torch.equal(steps.decode(places, tokens), plain.decode(places, tokens)), places
    assert torch.equal(steps.cache.memory.nan_to_num(), plain.cache.memory.nan_to_num())


def test_steps_of_any_size_slot_and_position_have_the_bytes_of_plain_ones() -> None:
    steps = Steps()
    check(steps, MIXED)
    # of every size the first step is recorded, and all others run as graphs
    assert route_of(steps) == Route("prepared", "prepared", len(MIXED) - 3, 0, (1, 2, 3))
    assert len(steps.graphs) == 3


def test_the_second_step_is_captured_and_carried_out_once() -> None:
    steps = Steps()
    for count, graphs in ((1, 0), (2, 1), (3, 1)):
        steps.decode([(0, count - 1)], [count])
        assert len(steps.graphs) == graphs
        assert steps.cache.memory[0, : count + 1, 0].isnan().tolist() == [False] * count + [True]


def test_a_step_runs_no_python_of_the_model_once_it_is_captured() -> None:
    steps = Steps()
    calls: list[int] = []
    steps.before = lambda: calls.append(1)
    check(steps, [[0]] * 6)
    assert len(calls) == 2


def test_steps_relaunched_from_the_tape_have_the_same_bytes() -> None:
    steps, plain = Steps(), Steps(replaying=False)
    check(steps, [[0, 2]] * 3, plain)
    retained_of(steps).request = "relaunched"
    check(steps, [[0, 2]] * 4, plain)
    route = route_of(steps)
    assert (route.requested, route.replays, route.relaunches) == ("relaunched", 2, 4)
    retained_of(steps).request = "eager"
    check(steps, [[0, 2]] * 2, plain)
    assert (route_of(steps).replays, route_of(steps).relaunches) == (2, 4)


def test_a_capture_that_fails_leaves_the_step_right_and_is_not_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hipfire"), "propagate", True)
    steps = Steps()
    tried: list[int] = []
    normal = steps.capture

    def failing(run: object) -> object:
        tried.append(1)
        # the model has run under the capture, and what it remembers was never computed
        normal(run)  # type: ignore[arg-type]
        raise InternalError("this graph cannot be made")

    retained_of(steps)._capture = failing  # type: ignore[assignment]
    check(steps, [[0]] * 4 + [[1, 2]] * 3)
    assert tried == [1]
    route = route_of(steps)
    assert (route.selected, route.replays, route.sizes) == ("eager", 0, ())
    assert "this graph cannot be made" in str(route.fallback_reason)
    # a record counts once, to however many loggers the handler is attached
    told = {id(record) for record in caplog.records if "operation by operation from now on" in record.message}
    assert len(told) == 1


def test_a_capture_of_something_else_than_the_recording_is_not_used() -> None:
    steps, plain = Steps(), Steps(replaying=False)
    extra: list[int] = []

    def before() -> None:
        extra.append(1)
        if len(extra) == 2:
            out = steps.engine.empty("attended", (1, 16))
            logits = steps.engine.empty("logits", (1, 32))
            constants = {"WIDTH": 16, "VOCAB": 32}
            steps.engine.launch(
                score_kernel, (1,), reads=[out], writes=[logits], constants=constants,
                x_ptr=out, logits_ptr=logits,
            )  # fmt: skip

    steps.before = before
    check(steps, [[0]] * 4, plain)
    assert "not what was recorded" in str(route_of(steps).fallback_reason)


def test_memory_that_moves_between_steps_is_not_captured() -> None:
    steps = Steps(scratch=FreshScratch(DEVICE))
    check(steps, [[0]] * 5)
    assert "not what was recorded" in str(route_of(steps).fallback_reason)


def test_a_replay_that_fails_fails_its_step_and_replays_nothing_more() -> None:
    steps, plain = Steps(), Steps(replaying=False)
    places = list(feed([[0]] * 7))
    for place, tokens in places[:3]:
        assert torch.equal(steps.decode(place, tokens), plain.decode(place, tokens))
    steps.graphs[0].fault = RuntimeError("the device was lost")
    with pytest.raises(ReplayError, match="the device was lost") as caught:
        steps.decode(*places[3])
    assert caught.value.kind == "internal"
    # the same step is right when it is asked for again, and so are later ones of every size
    for place, tokens in places[3:]:
        assert torch.equal(steps.decode(place, tokens), plain.decode(place, tokens))
    check(steps, [[1, 2]] * 3, plain)
    route = route_of(steps)
    assert (route.selected, route.replays, route.sizes, len(steps.graphs)) == ("eager", 2, (), 1)
    retained_of(steps).forget()
    assert "the device was lost" in str(route_of(steps).fallback_reason)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_model_that_fails_in_its_first_or_second_step_does_no_harm(broken: int) -> None:
    steps, plain, calls = Steps(), Steps(replaying=False), list[int]()

    def before() -> None:
        calls.append(1)
        if len(calls) == broken:
            raise ZeroDivisionError

    steps.before = before
    if broken == 1:
        with pytest.raises(ZeroDivisionError):
            steps.decode([(0, 0)], [1])
        assert retained_of(steps).facts(1) is None
    check(steps, [[0]] * 4, plain)
    # a first step that fails is its caller's; what fails under a capture ends replaying
    assert route_of(steps).replays == (3 if broken == 1 else 0)


def test_an_operation_outside_of_the_engine_is_never_captured() -> None:
    steps = Steps()
    steps.before = lambda: steps.engine.spoil("mystery")
    check(steps, [[0]] * 4)
    assert steps.graphs == []
    assert "operation mystery ran outside" in str(route_of(steps).fallback_reason)


def test_a_library_is_captured_but_not_relaunched() -> None:
    steps = Steps()
    steps.before = lambda: steps.engine.library("gemm", lambda: None, reads=[], writes=[])
    check(steps, [[0]] * 3)
    facts = retained_of(steps).facts(1)
    assert facts is not None
    assert facts.libraries == ("gemm",)
    retained_of(steps).request = "relaunched"
    with pytest.raises(UnsupportedError, match="gemm is a library's"):
        steps.decode([(0, 3)], [1])
    retained_of(steps).request = "prepared"
    before = route_of(steps).replays
    steps.decode([(0, 3)], [1])
    assert route_of(steps).replays == before + 1


def test_two_tokens_of_one_slot_and_chunks_are_no_decode_steps() -> None:
    steps, plain = Steps(), Steps(replaying=False)
    check(steps, [[0, 1]] * 3, plain)
    twice = [(Segment(0, 3, 1), (5,)), (Segment(0, 4, 1), (6,))]
    chunk = [(Segment(1, 3, 2), (5, 6))]
    for batch in (twice, chunk):
        assert torch.equal(steps.step(batch).clone(), plain.step(batch))
    assert route_of(steps).replays == 2


def test_the_graph_unused_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MOST_GRAPHS", 2)
    steps = Steps()
    check(steps, [[0], [0], [0, 1], [0, 1], [0], [0, 1, 2], [0, 1, 2], [0]])
    assert route_of(steps).sizes == (1, 3)


def test_forgetting_records_anew() -> None:
    steps = Steps()
    check(steps, [[0]] * 3)
    retained_of(steps).forget()
    assert retained_of(steps).facts(1) is None
    check(steps, [[0]] * 3)
    assert len(steps.graphs) == 2
