"""A model spread over processes computes what one process computes, and losing a process is an error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.layers.context import Segment
from hipfire.runtime.crew import Crew, PartnerError
from hipfire.runtime.load import LoadedModel, LoadOptions, check_load, load_model
from hipfire.runtime.parallel import LeadingRunner
from tiny_models import TOKENS, change_weights, tiny_model, write_folder, write_gguf

# sums are made in another order; a part that is left out or summed twice is off by tenths
TOLERANCE = 1e-5


def options(tp: int, **change: Any) -> LoadOptions:
    fields: dict[str, Any] = {"kv_cache": "f32", "max_seq": 64, "slots": 2, "residency": "decoded"}
    return LoadOptions(**{**fields, "device": "cpu", "prefill_chunk": 7, **change}, tp=tp)


def relative_rms(value: torch.Tensor, reference: torch.Tensor) -> float:
    error = (value.double() - reference.double()).square().mean().sqrt()
    return float(error / reference.double().square().mean().sqrt())


def everything(loaded: LoadedModel) -> list[torch.Tensor]:
    """Return logits of a chunked prefill, all rows, a mixed batch, decode steps and a slot's copied rows."""
    run, half = loaded.runner, len(TOKENS) // 2
    found = [run.prefill(0, TOKENS), run.all_logits(1, TOKENS[:half])]
    mixed = [(Segment(0, len(TOKENS), 1), [65]), (Segment(1, half, 3), [66, 67, 68])]
    found.append(run.step(mixed))
    for place in range(1, 4):
        batch = [(Segment(0, len(TOKENS) + place, 1), [70]), (Segment(1, half + 2 + place, 1), [71 + place])]
        found.append(run.step(batch))
    run.share_rows(0, 1, half)
    found.append(run.decode(1, 65, half))
    return found


@contextmanager
def spread(path: Path, **change: Any) -> Iterator[tuple[LoadedModel, Crew]]:
    loaded = load_model(path, options(2, **change))
    try:
        assert isinstance(loaded.runner, LeadingRunner)
        yield loaded, loaded.runner.partners
    finally:
        loaded.close()


def gone(pid: int) -> bool:
    """Tell whether a process of this one's has been ended and waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_two_processes_compute_what_one_does_until_one_is_lost(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    single = load_model(path, options(1))
    with spread(path) as (loaded, crew):
        assert loaded.config == single.config
        for mine, reference in zip(everything(loaded), everything(single), strict=True):
            assert mine.shape == reference.shape
            assert relative_rms(mine, reference) < TOLERANCE
        with pytest.raises(ValidationError, match="from 0 to 263"):
            loaded.runner.decode(0, 264, 3)
        # a step that is refused reaches no process
        assert relative_rms(loaded.runner.prefill(0, TOKENS), single.runner.prefill(0, TOKENS)) < TOLERANCE
        (pid,) = crew.pids
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PartnerError, match=r"part 1 .* ended with status -9.*load the model again"):
            loaded.runner.prefill(0, TOKENS)
        with pytest.raises(PartnerError, match="part 1"):
            loaded.runner.decode(0, 1, 0)
        assert time.monotonic() - began < 20
    assert gone(pid)


def test_one_key_head_in_both_and_the_head_by_rows_and_unload_ends_processes(tmp_path: Path) -> None:
    change = {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False}
    path = write_folder(tmp_path, tiny_model("gemma3", **change))
    single = load_model(path, options(1))
    with spread(path) as (loaded, crew):
        for mine, reference in zip(everything(loaded), everything(single), strict=True):
            assert relative_rms(mine, reference) < TOLERANCE
        pids = crew.pids
    assert [gone(pid) for pid in pids] == [True]


def test_what_another_process_cannot_load_is_told_by_the_first(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    damaged = model.model.layers[1].mlp.gate_proj.weight.detach().clone()
    # a row of the second part
    damaged[-1, 0] = torch.nan
    folder = change_weights(write_folder(tmp_path, model), {"model.layers.1.mlp.gate_proj.weight": damaged})
    with pytest.raises(PartnerError, match=r"part 1 .*gate_proj.*not finite in row 175"):
        load_model(folder, options(2))


@pytest.mark.parametrize(
    ("tp", "change", "reason"),
    [
        (3, {}, "8 query heads cannot be divided among 3"),
        (4, {"num_key_value_heads": 8, "intermediate_size": 250}, "250 feed-forward columns"),
        (4, {"num_attention_heads": 24, "num_key_value_heads": 6}, "6 key/value heads"),
    ],
)
def test_sizes_that_do_not_come_out_even_are_refused_before_processes_start(
    tmp_path: Path, tp: int, change: dict[str, int], reason: str
) -> None:
    folder = write_folder(tmp_path, tiny_model("qwen3", **change))
    with pytest.raises(UnsupportedError, match=reason):
        check_load(folder, options(tp))
    with pytest.raises(UnsupportedError, match="another number for tp"):
        load_model(folder, options(tp))


@pytest.mark.parametrize("tp", [0, -1, True, 1.5])
def test_tp_is_a_number_of_devices(tp: Any) -> None:
    with pytest.raises(ValidationError, match="tp is"):
        LoadOptions(tp=tp)
