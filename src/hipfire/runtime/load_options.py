"""What a caller may choose about a load, checked. This file does not know models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hipfire.base.errors import ValidationError

# tokens of a prompt that are fed at once: on a GPU a matrix is decoded once for each piece
PREFILL_CHUNK = 512
GPU_PREFILL_CHUNK = 2048


def device_number(device: str) -> int | None:
    """Return the number of the GPU that `device` names, None for `auto` and `cpu`; else ValidationError."""
    if device in ("auto", "cpu"):
        return None
    found = re.fullmatch(r"gpu(?::(\d{1,4}))?", device)
    if found is None:
        raise ValidationError(f"device {device!r} is unknown", hint="use auto, cpu, gpu or gpu:1")
    return int(found[1] or 0)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a caller may choose about a load; None and `auto` leave the choice to hipfire.

    `residency`, `threads` concern the CPU. `kv_backend` and `activations` concern a GPU: how the memory of
    caches is taken, and whether decode steps round activations to int8. `tp` devices share the model.
    """

    kv_cache: str = "auto"
    max_seq: int | None = None
    slots: int = 1
    residency: Literal["auto", "panels", "decoded", "packed"] = "auto"
    threads: int | None = None
    prefill_chunk: int | None = None
    device: str = "auto"
    kv_backend: Literal["auto", "vmm", "legacy"] = "auto"
    activations: Literal["int8", "float"] = "int8"
    tp: int = 1
    template_file: Path | None = None
    template_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.residency not in ("auto", "panels", "decoded", "packed"):
            raise ValidationError(
                f"residency {self.residency!r} is unknown", hint="use auto, panels, decoded or packed"
            )
        if self.kv_backend not in ("auto", "vmm", "legacy"):
            raise ValidationError(
                f"kv_backend {self.kv_backend!r} is unknown", hint="use auto, vmm or legacy"
            )
        if self.activations not in ("int8", "float"):
            raise ValidationError(f"activations {self.activations!r} are unknown", hint="use int8 or float")
        device_number(self.device)
        for name in ("slots", "tp", "prefill_chunk", "max_seq", "threads"):
            value = getattr(self, name)
            if name not in ("slots", "tp") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValidationError(f"{name} is {value!r} but must be an integer of at least 1")
