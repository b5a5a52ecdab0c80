"""Loading a model for a command: settings to options, threads, and word of what takes a while.

This file does not know what is done with the model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hipfire.base import env, log
from hipfire.checkpoint.progress import TransferProgress
from hipfire.cli.progress import is_live, make_progress
from hipfire.cli.settings import use_threads

if TYPE_CHECKING:
    from hipfire.engine.llm import LLM


def load_llm(path: Path, value: Callable[[str], Any], *, slots: int = 1) -> LLM:
    """Return the model at `path`, loaded as the settings say; `value` gives a setting by its dotted name."""
    template = value("prompt.chat_template")
    reading = ReadNote()
    options: dict[str, Any] = {
        "kv_cache": value("memory.kv_cache"),
        "residency": value("memory.weights"),
        "max_seq": value("memory.max_seq"),
        "threads": value("hardware.threads"),
        "device": value("hardware.device"),
        "kv_backend": value("memory.kv_backend"),
        "tp": value("hardware.tp"),
        "activations": value("hardware.activations"),
        "slots": slots,
        "template_file": Path(template) if template else None,
        "template_dir": env.templates_dir(),
    }
    # importing and loading make a million objects that stay: looking for garbage among them is wasted time
    gc.disable()
    try:
        # torch takes a second or two to import
        from hipfire.engine.llm import LLM  # noqa: PLC0415
        from hipfire.runtime.load import LoadOptions  # noqa: PLC0415

        use_threads(options["threads"])
        return LLM(path, LoadOptions(**options), compiling=CompileNote(), reading=reading)
    finally:
        reading.close()
        gc.freeze()
        gc.enable()


class CompileNote:
    """Tells on stderr that kernels are being compiled: a line that counts on a terminal, else two lines."""

    def __call__(self, done: int, total: int) -> None:
        """Say how many of `total` kernels are compiled."""
        text = "compiling kernels for this processor (first run only)"
        if is_live():
            sys.stderr.write(f"\rhipfire: {text}: {done} of {total}" + ("\n" if done == total else ""))
            sys.stderr.flush()
        elif done == 0:
            log.logger().info(f"{text}: {total} to do")
        elif done == total:
            log.logger().info(f"{text}: done")


class ReadNote:
    """Shows on stderr how far the weights are on their way to a GPU."""

    def __init__(self) -> None:
        self._display: TransferProgress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Say how many bytes of `total` are there."""
        if self._display is None:
            self._display = make_progress()
            self._display.start("reading weights to the GPU", total)
        self._display.update(done, total)

    def close(self) -> None:
        """Leave the display as it is; the reading ended, well or not."""
        if self._display is not None:
            self._display.finish()
