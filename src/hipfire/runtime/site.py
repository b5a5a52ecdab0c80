"""Where the steps of a model run, as its runner sees it, and the CPU as such a place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from hipfire.kernels.cpu.engine import CpuEngine
from hipfire.kernels.launch import Launcher
from hipfire.runtime.replay import DecodeReplay
from hipfire.runtime.route import Forward, Retained


class Site(Protocol):
    """Where the steps of a model run."""

    device: torch.device

    def memory(self, tokens: int, *, every_row: bool) -> AbstractContextManager[object]:
        """Return what gives a step of so many tokens memory for its results while it is entered."""

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits that no later step changes."""

    def retained(self, forward: Forward) -> Retained | None:
        """Return what keeps decode steps for replay, if the site can do that."""


class HostSite:
    """The CPU, with or without compiled kernels."""

    device = torch.device("cpu")

    def __init__(self, launcher: Launcher) -> None:
        self._engine = launcher.engines.get("numba")

    def memory(self, tokens: int, *, every_row: bool) -> AbstractContextManager[object]:
        """Return nothing to enter: every result has memory of its own."""
        return nullcontext()

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, which are a copy or fresh."""
        return logits

    def retained(self, forward: Forward) -> Retained | None:
        """Return the replay of compiled kernels."""
        return DecodeReplay(self._engine, forward) if isinstance(self._engine, CpuEngine) else None
