"""Which device a load goes to, with machines that are made up."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from hipfire.base.errors import UnsupportedError, ValidationError
from hipfire.base.types import StateSpec
from hipfire.device.platform import Gpu
from hipfire.runtime import devices
from hipfire.runtime.devices import choose_gpu, gpu_for
from hipfire.runtime.load_options import LoadOptions

CARD = Gpu("A card", "cuda", "sm_90", 0, 1 << 34, 132, "580.1", "2.11", "13.0", ("sm_90",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one GPU and everything that it needs."""
    monkeypatch.setattr(devices, "find_gpu", lambda index=0: CARD)
    monkeypatch.setattr(devices, "check_supported", lambda gpu: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", "cc")
    return monkeypatch


def test_auto_takes_a_gpu_that_can_be_used_unless_the_cpu_was_chosen(machine: pytest.MonkeyPatch) -> None:
    assert choose_gpu(LoadOptions()) is CARD
    assert choose_gpu(LoadOptions(device="cpu")) is None
    assert choose_gpu(LoadOptions(residency="panels")) is None
    with pytest.raises(ValidationError, match="cannot be held as panels on a GPU"):
        choose_gpu(LoadOptions(device="gpu", residency="panels"))


@pytest.mark.parametrize(
    ("lacking", "words"),
    [("triton", "need Triton"), ("compiler", "needs a C compiler"), ("support", "too old")],
)
def test_what_a_gpu_lacks_is_said_before_anything_is_loaded(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str, words: str
) -> None:
    if lacking == "triton":
        machine.setattr(importlib.util, "find_spec", lambda name: None)
    elif lacking == "compiler":
        machine.delenv("CC")
        machine.setattr(devices.shutil, "which", lambda name: None)
    else:

        def refuse(gpu: Gpu) -> None:
            raise UnsupportedError("the driver is too old")

        machine.setattr(devices, "check_supported", refuse)
    with pytest.raises(UnsupportedError, match=words):
        choose_gpu(LoadOptions(device="gpu"))
    with caplog.at_level(logging.WARNING, logger="hipfire"):
        assert choose_gpu(LoadOptions()) is None
    assert "goes to the CPU" in caplog.text


def test_a_gpu_that_is_not_there_is_refused(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(devices, "find_gpu", lambda index=0: None)
    assert choose_gpu(LoadOptions()) is None
    with pytest.raises(ValidationError, match="there is no GPU"):
        choose_gpu(LoadOptions(device="gpu:3"))
    with pytest.raises(ValidationError, match="unknown"):
        LoadOptions(device="cuda")


class _Config:
    def __init__(self, *states: StateSpec) -> None:
        self._states = states

    def state_specs(self) -> tuple[StateSpec, ...]:
        return self._states


def test_models_with_states_go_to_the_cpu_and_say_so(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recurrent, other = _Config(StateSpec(96, 4, 2, 2, 16, 16)), _Config()
    assert gpu_for(other, LoadOptions()) is CARD
    with caplog.at_level(logging.WARNING, logger="hipfire"):
        assert gpu_for(recurrent, LoadOptions()) is None
    assert "gated DeltaNet layers do not run on GPUs" in caplog.text
    assert gpu_for(recurrent, LoadOptions(device="cpu")) is None
    with pytest.raises(UnsupportedError, match="do not run on GPUs"):
        gpu_for(recurrent, LoadOptions(device="gpu"))
