"""A model that is spread over processes, from the first of them: it leads their steps.

The first process runs requests like any other load. Before each step it tells the others what the step is;
they run the same, and sum partial results with it. This file knows no request and no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hipfire.base.cpu import usable_threads
from hipfire.base.errors import ValidationError
from hipfire.runtime.crew import Crew, PartnerError
from hipfire.runtime.load_options import LoadOptions
from hipfire.runtime.parallel_messages import Batch, Message, ShareRows, Step
from hipfire.runtime.runner import Runner, Snapshot


class LeadingRunner(Runner):
    """The runner of the first process: all others run every step that it runs."""

    def __init__(self, inner: Runner, crew: Crew) -> None:
        super().__init__(inner.model, inner.cache, inner.launcher, chunk=inner.chunk, site=inner.site)
        self._crew = crew

    @property
    def partners(self) -> Crew:
        """Return the other processes."""
        return self._crew

    def step(self, batch: Batch, *, every_row: bool = False) -> torch.Tensor:
        """Run one step, as `Runner.step`, in all processes; PartnerError if one is lost."""
        self._check(batch)
        for segment, _ in batch:
            self.cache.ensure(segment.slot, segment.start + segment.length)
        self._crew.tell(Step(batch, every_row))
        return self._crew.together(lambda: super(LeadingRunner, self).step(batch, every_row=every_row))

    def share_rows(self, source: int, target: int, count: int, snapshot: Snapshot | None = None) -> None:
        """Let `target` begin with rows of `source`, as `Runner.share_rows`, in all processes."""
        super().share_rows(source, target, count, snapshot)
        self._crew.tell(ShareRows(source, target, count))


def follow(runner: Runner, message: Message) -> None:
    """Do in this process what the first one does."""
    if isinstance(message, Step):
        runner.step(message.batch, every_row=message.every_row)
    elif isinstance(message, ShareRows):
        runner.share_rows(message.source, message.target, message.count)


def start_crew(path: Path, options: LoadOptions, first: int | None) -> LoadCrew:
    """Start the processes that will hold a model with this one, `options.tp` in all.

    `first` is the number of the GPU of this process, whose neighbors hold the other parts; None for the CPU.
    Raises ValidationError if there are too few GPUs, PartnerError if a process ends.
    """
    numbers = range(first or 0, (first or 0) + options.tp)
    if first is not None and torch.cuda.device_count() < numbers.stop:
        raise ValidationError(
            f"tp={options.tp} needs the GPUs {numbers.start} to {numbers.stop - 1}, "
            f"but this machine has {torch.cuda.device_count()}",
            hint="use a smaller tp",
        )
    return LoadCrew(["cpu" if first is None else f"cuda:{number}" for number in numbers], path, options)


class LoadCrew(Crew):
    """The processes of a model that is loaded from a path."""

    def __init__(self, devices: Sequence[str], path: Path, options: LoadOptions) -> None:
        self.options = part_options(options, torch.device(devices[0]))
        fields = {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()
        }
        super().__init__(devices, {"path": str(path.absolute()), "options": fields})

    def lead(self, loaded: Loaded) -> LeadingRunner:
        """Return what runs a model of which this process has loaded its part, once all others have too."""
        try:
            self.wait()
        except PartnerError:
            loaded.close()
            raise
        runner = LeadingRunner(loaded.runner, self)
        if loaded.on_gpu is not None:
            # whose graphs go before the memory that they use
            loaded.on_gpu.runner = runner
        return runner


class Loaded(Protocol):
    """A loaded part."""

    @property
    def runner(self) -> Runner:
        """What runs it."""

    @property
    def on_gpu(self) -> Any:
        """What it is on a GPU, None on the CPU."""

    def close(self) -> None:
        """Give it back."""


def part_options(options: LoadOptions, device: torch.device) -> LoadOptions:
    """Return the options of one process on its device; processes on the CPU share its threads."""
    if device.type == "cpu":
        threads = options.threads or max(1, usable_threads() // options.tp)
        return replace(options, device="cpu", threads=threads, tp=1)
    return replace(options, device=f"gpu:{device.index}", tp=1)


def options_from(fields: Mapping[str, Any]) -> LoadOptions:
    """Return the options that a worker's task holds."""
    paths = {name: Path(value) for name, value in fields.items() if name.startswith("template_") and value}
    return LoadOptions(**{**fields, **paths})
